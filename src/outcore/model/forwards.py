"""Putting something around a module's forward, inside its hooks, and taking it away again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
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


def where_recorded(
    module: nn.Module, run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
) -> Callable[[], None]:
    """Let ``run(forward, args, kwargs)`` stand for a module's forward where autograd records it, and only there.

    Returns:
        As `around_forward`.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(original, args, kwargs) if torch.is_grad_enabled() else original(*args, **kwargs)

        return forward

    return around_forward(module, make)
