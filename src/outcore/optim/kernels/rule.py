"""What an update rule tells the engine, so that the engine never asks which optimizer it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from outcore.chunks.layout import Slot
from outcore.chunks.store import PlaneType
from outcore.optim.kernels.master import Master
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers

Planes = tuple[Tensor, ...]
"""The planes of a state chunk, or of a part of one, in the order of `Rule.planes`; each with an entry for each
element, or for each ``shared`` of them."""

Plane = PlaneType
"""The kind of one of them."""


class Rule(Protocol):
    """An update rule. All tensors are flat, contiguous, on the CPU, and (but for what is shared) of one length.

    ``param`` is in the precision that computes. Where the master is follows from the planes. Two calls with
    disjoint elements may run at the same time.
    """

    @property
    def can_split(self) -> bool:
        """Whether bf16 parameters can have `Master.SPLIT`."""

    @property
    def whole_parameters(self) -> bool:
        """Whether `update` must see a parameter as a whole, and know which it is."""

    def planes(self, param_dtype: torch.dtype, master: Master) -> tuple[Plane, ...]:
        """The planes for parameters of this dtype.

        Raises:
            UsageError: the master can't live there.
        """

    def initialise(self, planes: Planes, param: Tensor, master_values: Tensor) -> None:
        """Set the states before the first step, and ``param`` to the rounded ``master_values`` (fp32)."""

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
        """Do one step on ``param`` and ``planes``.

        Args:
            param: bf16, fp16 or fp32; written.
            grad: bf16, fp16 or fp32.
            planes: written.
            hyper: a parameter group's hyperparameters, by the names of `torch.optim`.
            step: the number of this step for these parameters, counted from 1.
            transform: what each gradient goes through first.
            workers: threads to use; the common ones if not given.
            slot: the parameter; given where `whole_parameters` asks for it.
        """

    def master(self, param: Tensor, planes: Planes, out: Tensor) -> None:
        """Read the masters into ``out``, fp32."""

    def set_master(self, param: Tensor, planes: Planes, values: Tensor) -> None:
        """Set the masters to ``values``, fp32, and ``param`` to them rounded. Moments stay."""

    def moments(self, planes: Planes) -> dict[str, Tensor]:
        """Copies of the moments, fp32, by the names of `torch.optim`."""

    def set_moments(self, planes: Planes, values: Mapping[str, Tensor]) -> None:
        """Set the moments named in ``values``, fp32. Masters stay."""
