"""What blocks do with their activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outcore.errors import ModelError
from outcore.model.policies import Activations
from outcore.model.slices.block import Collect, recompute_in_slices
from outcore.model.units import Point


def treat_blocks(
    points: Iterable[Point], activations: Activations, collect: Collect
) -> Iterator[Callable[[], None]]:
    """Let blocks do with their activations as the policy says.

    Args:
        collect: takes the gradients of parameters that are summed over slices.

    Yields:
        A function that undoes it, for each block that was changed.

    Raises:
        ModelError: a block that is to run in slices recomputes itself already.
    """
    if activations.blocks != "recompute":
        return
    for point in points:
        if not point.block:
            continue
        if activations.microbatch is not None:
            if recomputes_itself(point.module):
                raise ModelError(
                    f"the block {point.name} checkpoints itself, so it can't run in slices: call "
                    "model.gradient_checkpointing_disable(), or leave microbatch out"
                )
            yield recompute_in_slices(point.module, point.name, activations.microbatch, collect)
        elif not recomputes_itself(point.module):
            yield recompute(point.module)


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
