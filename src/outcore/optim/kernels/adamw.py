"""AdamW and Adam.

Loshchilov and Hutter 2019, "Decoupled weight decay regularization"; Kingma and Ba 2015, "Adam: a method for
stochastic optimization".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outcore.chunks.layout import Slot
from outcore.errors import UsageError
from outcore.optim.kernels import launch
from outcore.optim.kernels.codecs import FP32, Codec
from outcore.optim.kernels.elementwise import Elementwise, number, pair
from outcore.optim.kernels.rule import Planes
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers

f32 = np.float32


@dataclass(frozen=True)
class AdamRule(Elementwise):
    """AdamW, or Adam where weight decay is not decoupled.

    Hyperparameters: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize`` (False).

    Attributes:
        decoupled: weight decay shrinks the master (AdamW) instead of joining the gradient (Adam).
        codec: how the moments are kept.
    """

    decoupled: bool = True
    codec: Codec = FP32

    @property
    def names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @property
    def can_split(self) -> bool:
        return True

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
        if hyper.get("amsgrad"):
            raise UsageError("amsgrad is not supported: leave it False")
        beta1, beta2 = pair(hyper, "betas")
        adamw(
            param,
            grad,
            planes,
            lr=number(hyper, "lr"),
            beta1=beta1,
            beta2=beta2,
            eps=number(hyper, "eps"),
            weight_decay=number(hyper, "weight_decay"),
            step=step,
            decoupled=self.decoupled,
            codec=self.codec,
            maximize=bool(hyper.get("maximize")),
            transform=transform,
            workers=workers,
        )


def adamw(
    param: Tensor,
    grad: Tensor,
    planes: Planes,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool = True,
    codec: Codec = FP32,
    maximize: bool = False,
    transform: GradTransform | None = None,
    workers: Workers | None = None,
) -> None:
    """One step of AdamW in one pass, by the formulas of `torch.optim.AdamW` without amsgrad.

    Args:
        param: shape [n], bf16, fp16 or fp32; written.
        grad: shape [n], bf16, fp16 or fp32.
        planes: the master (fp32, or its low 16 bits; none if ``param`` is fp32), then ``exp_avg`` and
            ``exp_avg_sq`` as ``codec`` keeps them; written.
        step: the number of this step, counted from 1.
        decoupled: AdamW; False for Adam.
        codec: of the moments.

    Raises:
        UsageError: tensors that don't fit together.
    """
    rule = AdamRule(decoupled, codec)
    master, moments = rule.parts(planes)
    kinds = codec.planes(rule.names)
    if kinds[0].dtype is not torch.float32 and torch.float16 in (param.dtype, grad.dtype):
        codec.check(torch.float16)
    scalars = (
        *(transform or GradTransform()).scalars(negate=maximize),
        f32(1 - lr * weight_decay if decoupled else 1.0),
        not decoupled and weight_decay != 0,
        f32(weight_decay),
        f32(beta1),
        f32(1 - beta1),
        f32(beta2),
        f32(1 - beta2),
        # a factor, because a division more for each element would cost as much as the rest
        f32(1 / math.sqrt(1 - beta2**step)),
        f32(eps),
        f32(-lr / (1 - beta1**step)),
        *codec.scalars(step),
    )
    own, shared = moments[:2], moments[2:]
    name = f"adamw{codec.kernel}"
    launch.update(name, param, grad, master, own, scalars, workers, (kinds[0].dtype,), shared)
