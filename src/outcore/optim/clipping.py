"""Clipping and unscaling as one transform that the update kernels apply to each gradient.

Gradients are never rewritten in place: a clip notes a factor or a bound, and the kernel applies it in fp32
as it reads the gradient, so clipping costs no pass over memory and loses no bits to a 16-bit gradient.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

from outcore.errors import StateError, UsageError
from outcore.optim.kernels import GradTransform


def scaled(transform: GradTransform, factor: float) -> GradTransform:
    """``transform`` followed by a multiplication."""
    if math.isinf(transform.clamp):
        return replace(transform, pre_scale=transform.pre_scale * factor)
    return replace(transform, post_scale=transform.post_scale * factor)


def clamped(transform: GradTransform, bound: float) -> GradTransform:
    """``transform`` followed by a clamp to [-bound, bound].

    Raises:
        UsageError: the bound is not a positive number.
        StateError: the gradients were clamped and then rescaled already.
    """
    if not bound > 0:
        raise UsageError(f"a gradient can only be clipped to a positive value, not to {bound}")
    if transform.post_scale != 1.0:
        raise StateError("clip_grad_value_ was called again after clip_grad_norm_ in the same step")
    return replace(transform, clamp=min(transform.clamp, float(bound)))


def norm(squares: float, transform: GradTransform) -> float:
    """The norm after ``transform``, from the sum of squares before scaling (after clamping, if it clamps)."""
    factor = transform.pre_scale if math.isinf(transform.clamp) else transform.post_scale
    return math.sqrt(squares) * abs(factor) if squares >= 0 else squares


def clip_factor(total: float, max_norm: float) -> float:
    """What gradients of norm ``total`` are multiplied with (as `torch.nn.utils.clip_grad_norm_` does).

    Rounded to fp32, in which it is applied.
    """
    return ctypes.c_float(min(max_norm / (total + 1e-6), 1.0)).value
