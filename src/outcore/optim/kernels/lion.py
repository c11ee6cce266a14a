"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outcore.chunks.layout import Slot
from outcore.optim.kernels import launch
from outcore.optim.kernels.elementwise import Elementwise, number, pair
from outcore.optim.kernels.rule import Planes
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers

f32 = np.float32


@dataclass(frozen=True)
class LionRule(Elementwise):
    """Lion. Hyperparameters: ``lr``, ``betas``, ``weight_decay``, ``maximize`` (False)."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg",)

    @property
    def can_split(self) -> bool:
        return False

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
        del step
        beta1, beta2 = pair(hyper, "betas")
        lion(
            param,
            grad,
            planes,
            lr=number(hyper, "lr"),
            beta1=beta1,
            beta2=beta2,
            weight_decay=number(hyper, "weight_decay"),
            maximize=bool(hyper.get("maximize")),
            transform=transform,
            workers=workers,
        )


def lion(
    param: Tensor,
    grad: Tensor,
    planes: Planes,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    transform: GradTransform | None = None,
    workers: Workers | None = None,
) -> None:
    """One step of Lion in one pass. Where the direction is 0 or NaN it is its own sign.

    Args:
        param: shape [n], bf16, fp16 or fp32; written.
        grad: shape [n], bf16, fp16 or fp32.
        planes: the fp32 master (none if ``param`` is fp32), then ``exp_avg``, fp32; each of shape [n];
            written.

    Raises:
        UsageError: tensors that don't fit together.
    """
    master, moments = LionRule().parts(planes)
    scalars = (
        *(transform or GradTransform()).scalars(negate=maximize),
        f32(1 - lr * weight_decay),
        f32(beta1),
        f32(1 - beta1),
        f32(beta2),
        f32(1 - beta2),
        f32(-lr),
    )
    launch.update("lion", param, grad, master, moments, scalars, workers)
