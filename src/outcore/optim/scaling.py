"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor a loss is multiplied with so that small gradients survive fp16.

    Attributes:
        value: the factor now.
        growth: what it is multiplied with after ``interval`` steps without overflow.
        backoff: what it is multiplied with after an overflow.
        interval: good steps in a row before it grows.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Adapt after a step."""
        if overflowed:
            self.value = max(self.value * self.backoff, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value *= self.growth
            self.good_steps = 0
