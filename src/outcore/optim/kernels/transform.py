"""What happens to a gradient between memory and the update: unscaling and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class GradTransform:
    """``g = post_scale * clip(pre_scale * float32(grad), -clamp, clamp)``, each factor rounded to fp32.

    Neutral by default, and then exact. A NaN stays a NaN.

    Attributes:
        pre_scale: first factor, for example 1 / loss scale.
        clamp: largest magnitude, not negative.
        post_scale: last factor, for example that of clipping by the norm.
    """

    pre_scale: float = 1.0
    clamp: float = math.inf
    post_scale: float = 1.0

    def scalars(self, negate: bool = False) -> tuple[np.float32, np.float32, np.float32]:
        """The three numbers as kernels take them; ``negate`` turns ascent into descent."""
        after = -self.post_scale if negate else self.post_scale
        return np.float32(self.pre_scale), np.float32(self.clamp), np.float32(after)

    def apply(self, grad: torch.Tensor) -> torch.Tensor:
        """The transformed gradient, fp32, a new tensor of the same shape: the bits that kernels work with."""
        before, clamp, after = map(float, self.scalars())
        values = grad.to(torch.float32) * before
        values = torch.where(values > clamp, clamp, values)
        values = torch.where(values < -clamp, -clamp, values)
        return values * after
