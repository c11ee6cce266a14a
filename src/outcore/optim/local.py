"""An optimizer's work done wholly in memory, on ``.grad``: what offloaded runs are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from outcore.chunks.layout import BLOCK, Slot
from outcore.optim.due import Due
from outcore.optim.kernels import GradTransform, Master, Rule, sum_of_squares, workers


class LocalBackend:
    """States in memory beside their parameters; low-precision parameters get an fp32 master.

    Args:
        rule: the update rule.
        parameters: all parameters, contiguous and on the CPU.
    """

    def __init__(self, rule: Rule, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._rule = rule
        self._parameters = list(parameters)
        self._planes: dict[int, tuple[torch.Tensor, ...]] = {}

    def sum_of_squares(self, transform: GradTransform) -> float:
        sums: list[float] = []
        measured = transform if not math.isinf(transform.clamp) else GradTransform()
        for index in sorted(self.present()):
            grad = self._gradient(index)
            block = torch.zeros(-(-grad.numel() // BLOCK), dtype=torch.float64)
            sum_of_squares(grad, block, transform=measured, workers=workers())
            sums += block.tolist()
        if not all(map(math.isfinite, sums)):
            return math.nan if any(map(math.isnan, sums)) else math.inf
        return math.fsum(sums)

    def first_nonfinite(self) -> str | None:
        found = (i for i in sorted(self.present(), reverse=True) if not self._gradient(i).isfinite().all())
        index = next(found, None)
        return None if index is None else f"parameter {index}"

    def present(self) -> set[int]:
        return {index for index, p in enumerate(self._parameters) if p.grad is not None}

    def apply(self, due: Due) -> None:
        for index in sorted(self.present()):
            self._rule.update(
                self._parameters[index].detach().view(-1),
                self._gradient(index),
                self._states(index),
                hyper=due.hyper[due.group_of[index]],
                step=due.steps[index],
                transform=due.transform,
                workers=workers(),
                slot=Slot(index, self._parameters[index].shape, 0),
            )

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def state(self, index: int) -> Mapping[str, torch.Tensor]:
        shape = self._parameters[index].shape
        return {k: v.view(shape) for k, v in self._rule.moments(self._states(index)).items()}

    def _gradient(self, index: int) -> torch.Tensor:
        grad = self._parameters[index].grad
        assert grad is not None
        return grad.detach().reshape(-1)

    def _states(self, index: int) -> tuple[torch.Tensor, ...]:
        if index not in self._planes:
            flat = self._parameters[index].detach().view(-1)
            master = Master.NONE if flat.dtype is torch.float32 else Master.FULL
            planes = tuple(
                torch.zeros(plane.nbytes(flat.numel()) // plane.dtype.itemsize, dtype=plane.dtype)
                for plane in self._rule.planes(flat.dtype, master)
            )
            self._rule.initialise(planes, flat, flat.float())
            self._planes[index] = planes
        return self._planes[index]
