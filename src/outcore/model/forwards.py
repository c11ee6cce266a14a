"""Putting something around a module's forward, inside its hooks, and taking it away again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def around_forward(
    module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a module's ``forward`` by what is made of it, under the same name and signature.

    Returns:
        A function that undoes it; of several on one module the last is undone first.
    """
    original = module.forward
    forward = functools.wraps(original)(make(original))
    had = "forward" in module.__dict__
    module.forward = forward

    def undo() -> None:
        if module.__dict__.get("forward") is forward:
            if had:
                module.forward = original
            else:
                del module.__dict__["forward"]

    return undo
