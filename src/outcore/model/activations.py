"""Recomputation of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(module: nn.Module) -> Callable[[], None]:
    """Let a block's backward recompute its forward instead of keeping what it left.

    The block's own hooks stay outside, so that its parameters are open while it is recomputed. Random numbers
    (dropout) come out the same.

    Returns:
        A function that undoes it.
    """
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    module.forward = forward

    def undo() -> None:
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if getattr(module.forward, "__func__", None) is not getattr(original, "__func__", None):
                module.forward = original

    return undo


def recomputes_itself(block: nn.Module) -> bool:
    """Whether the block's own class checkpoints it already (transformers' ``gradient_checkpointing_enable``)."""
    return bool(getattr(block, "gradient_checkpointing", False))
