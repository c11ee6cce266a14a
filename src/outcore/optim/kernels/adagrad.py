"""Adagrad (Duchi, Hazan and Singer 2011, "Adaptive subgradient methods"), as `torch.optim.Adagrad` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outcore.chunks.layout import Slot
from outcore.errors import UsageError
from outcore.optim.kernels import launch
from outcore.optim.kernels.elementwise import Elementwise, number
from outcore.optim.kernels.rule import Planes
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers

f32 = np.float32


@dataclass(frozen=True)
class AdagradRule(Elementwise):
    """Adagrad.

    Hyperparameters: ``lr``, ``lr_decay`` (0), ``eps``, ``weight_decay`` (0), ``maximize`` (False).

    Attributes:
        initial: what the sum of squares starts from, not negative.

    Raises:
        UsageError: ``initial`` is negative.
    """

    initial: float = 0.0

    def __post_init__(self) -> None:
        if not self.initial >= 0:
            raise UsageError(f"Adagrad's sum of squares can't start from {self.initial}, which is negative")

    @property
    def names(self) -> tuple[str, ...]:
        return ("sum",)

    @property
    def can_split(self) -> bool:
        return True

    def start(self, name: str) -> float:
        del name
        return self.initial

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        planes: Planes,
        hyper: Mapping[str, object],
        step: int,
        transform: GradTransform,
        workers: Workers | None = None,
        slot: Slot | None = None,
    ) -> None:
        adagrad(
            param,
            grad,
            planes,
            lr=number(hyper, "lr"),
            lr_decay=number(hyper, "lr_decay", 0.0),
            eps=number(hyper, "eps"),
            weight_decay=number(hyper, "weight_decay", 0.0),
            step=step,
            maximize=bool(hyper.get("maximize")),
            transform=transform,
            workers=workers,
        )


def adagrad(
    param: Tensor,
    grad: Tensor,
    planes: Planes,
    *,
    lr: float,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    step: int,
    maximize: bool = False,
    transform: GradTransform | None = None,
    workers: Workers | None = None,
) -> None:
    """One step of Adagrad in one pass, by the formulas of `torch.optim.Adagrad`.

    Args:
        param: shape [n], bf16, fp16 or fp32; written.
        grad: shape [n], bf16, fp16 or fp32.
        planes: the master (fp32, or its low 16 bits; none if ``param`` is fp32), then ``sum``, fp32; each of
            shape [n]; written.
        step: the number of this step, counted from 1.

    Raises:
        UsageError: tensors that don't fit together.
    """
    master, moments = AdagradRule().parts(planes)
    scalars = (
        *(transform or GradTransform()).scalars(negate=maximize),
        weight_decay != 0,
        f32(weight_decay),
        f32(eps),
        f32(-lr / (1 + (step - 1) * lr_decay)),
    )
    launch.update("adagrad", param, grad, master, moments, scalars, workers)
