"""AdamW, Adam, SGD, Lion and Adagrad, with the arguments PyTorch users know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from outcore.errors import UsageError
from outcore.optim.kernels import AdagradRule, AdamRule, LionRule, Moments, SGDRule, codec
from outcore.optim.optimizer import Optimizer

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decay of the weights, times ``lr``, per step.
        maximize: climb instead of descending.
        moments: ``"fp32"``, or narrower and not exact: ``"bf16"`` takes 4 bytes per parameter less, ``"8bit"`` 5.97
            (block-wise, after Dettmers et al. 2022). Masters stay exact.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        moments: Moments = "fp32",
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, AdamRule(True, codec(moments)))


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); ``weight_decay`` is added to the gradient. Arguments as for `AdamW`."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        moments: Moments = "fp32",
    ) -> None:
        _check(lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, AdamRule(False, codec(moments)))


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum: decay of the velocity; 0 keeps none.
        dampening: share of a gradient that does not enter the velocity.
        weight_decay: added to the gradient, times the weight.
        nesterov: look ahead along the velocity.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, momentum=momentum)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UsageError("nesterov needs a momentum above 0 and no dampening")
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        listed: Any = list(params)
        buffers = momentum != 0 or any(g.get("momentum") for g in listed if isinstance(g, dict))
        super().__init__(listed, defaults, SGDRule(momentum=buffers))


class Lion(Optimizer):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    Args:
        params: parameters or parameter groups.
        lr: learning rate; three to ten times smaller than AdamW's.
        betas: interpolation for the update, and decay of the momentum.
        weight_decay: decay of the weights, times ``lr``, per step.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults, LionRule())


class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011), as `torch.optim.Adagrad`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        lr_decay: decay of the learning rate per step.
        weight_decay: added to the gradient, times the weight.
        initial_accumulator_value: what the sums of squares start from.
        eps: added to the root of the sum.
        maximize: climb instead of descending.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        maximize: bool = False,
    ) -> None:
        _check(
            lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, initial=initial_accumulator_value
        )
        defaults = dict(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=maximize)
        super().__init__(params, defaults, AdagradRule(initial=initial_accumulator_value))


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise UsageError(f"{name} must not be negative, and is {value}")
        if name.startswith("beta") and value >= 1:
            raise UsageError(f"{name} must lie below 1, and is {value}")
