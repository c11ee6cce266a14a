"""Stochastic gradient descent with momentum (Sutskever et al. 2013), as `torch.optim.SGD` has it."""

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
class SGDRule(Elementwise):
    """SGD.

    Hyperparameters: ``lr``, ``momentum`` (0), ``dampening`` (0), ``nesterov`` (False), ``weight_decay`` (0),
    ``maximize`` (False).

    Attributes:
        momentum: whether there is a momentum buffer. Without one, ``momentum`` must be 0 in every group.
    """

    momentum: bool

    @property
    def names(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

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
        master, moments = self.parts(planes)
        momentum = number(hyper, "momentum", 0.0)
        if momentum and not moments:
            raise UsageError(
                f"momentum {momentum} needs a momentum buffer, but no parameter group had momentum "
                "when the optimizer was made"
            )
        sgd(
            param,
            grad,
            master,
            moments[0] if moments else None,
            lr=number(hyper, "lr"),
            momentum=momentum,
            dampening=number(hyper, "dampening", 0.0),
            nesterov=bool(hyper.get("nesterov")),
            weight_decay=number(hyper, "weight_decay", 0.0),
            first_step=step == 1,
            maximize=bool(hyper.get("maximize")),
            transform=transform,
            workers=workers,
        )


def sgd(
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    first_step: bool = False,
    maximize: bool = False,
    transform: GradTransform | None = None,
    workers: Workers | None = None,
) -> None:
    """One step of SGD in one pass, by the formulas of `torch.optim.SGD`.

    Args:
        param: shape [n], bf16, fp16 or fp32; written.
        grad: shape [n], bf16, fp16 or fp32.
        master: the fp32 master, shape [n], if ``param`` is not fp32; written.
        buffer: the momentum buffer, fp32, shape [n]; untouched if ``momentum`` is 0, as in torch.
        first_step: the buffer holds nothing yet and becomes the gradient, without dampening.

    Raises:
        UsageError: tensors that don't fit together.
    """
    common = (
        *(transform or GradTransform()).scalars(negate=maximize),
        weight_decay != 0,
        f32(weight_decay),
        f32(-lr),
    )
    if momentum == 0 or buffer is None:
        launch.update("sgd", param, grad, master, (), common, workers)
        return
    scalars = (*common, f32(momentum), f32(1 - dampening), nesterov, first_step)
    launch.update("sgd_momentum", param, grad, master, (buffer,), scalars, workers)
