"""Backward passes of a rank that has no rows: they happen, and must count for nothing.

[Note: Zero times NaN]
Such a rank runs rows of another's with weight 0, so that it takes part in what all do together. Zero times what is
finite is zero, but a loss or a derivative that is not finite would make it NaN, and the step would be skipped for rows
that one process on the whole batch never ran by themselves. (A mean over no labels is one such loss.) So the weighed
loss is a zero by itself, and what such a pass leaves as NaN is replaced by zeros.

A user may have added something to the weighed loss that does count. Then finite values other than zero come as well,
and nobody can say what a NaN would have been without it: it stays, and the step is skipped, as for any other pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Rowless(Protocol):
    """Told of passes without rows."""

    def begin(self) -> None:
        """The backward pass that runs now is one."""


class NothingCounted:
    """Cleans the gradients of passes without rows; see [Note: Zero times NaN]. Implements `Rowless`.

    Args:
        number: gives the number of the backward pass that runs.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._of = 0
        self._cleaned = False
        self._counted = False

    def begin(self) -> None:
        if self._of != self._number():
            self._of, self._cleaned, self._counted = self._number(), False, False

    def clean(self, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient, of any shape and dtype, with zeros for NaN if nothing in this pass counts."""
        if self._of == 0 or self._of != self._number():
            return gradient
        unknown = gradient.isnan()
        self._counted = self._counted or bool(((gradient != 0) & ~unknown).any())
        found = bool(unknown.any())
        if self._counted:  # what was cleaned before might have counted as well
            return torch.full_like(gradient, torch.nan) if self._cleaned else gradient
        self._cleaned = self._cleaned or found
        return torch.zeros_like(gradient) if found else gradient


def nothing(loss: torch.Tensor, rowless: Rowless) -> torch.Tensor:
    """Zero, of the loss's shape and dtype, whose backward goes through all that the loss depends on."""
    found: torch.Tensor = _Nothing.apply(loss, rowless)  # type: ignore[no-untyped-call]
    return found


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, rowless: Rowless) -> torch.Tensor:
        ctx.rowless = rowless
        return torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.rowless.begin()
        return torch.zeros_like(gradient), None
