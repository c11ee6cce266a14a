"""What blocks do with their activations.

[Note: Offloaded inputs]
Hooks for saved tensors form a stack, and the innermost count. Outside of a checkpoint they see what it saves itself,
the block's inputs; inside of one they would take what the checkpoint means to drop. So they go around what
`recompute` put there, and a call within somebody else's hooks is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from outcore.errors import ModelError
from outcore.model.forwards import where_recorded
from outcore.model.policies import Activations, ActivationsName, fits, offloads, recomputes
from outcore.model.recomputation import Recomputation
from outcore.model.saved.seam import Saver
from outcore.model.slices.block import Collect, recompute_in_slices
from outcore.model.units import Point

Ways = Mapping[str, ActivationsName]
"""What each block does, by its full name."""


def ways_of(points: Iterable[Point], activations: Activations) -> dict[str, ActivationsName]:
    """What each block of a model does.

    Raises:
        ModelError: a name means no block, or a block that checkpoints itself can't do what it should.
        UsageError: a function gives no way.
    """
    blocks = {point.name: point.module for point in points if point.block}
    named = activations.units if isinstance(activations.units, tuple) else ()
    for pattern, _ in named:
        if not any(fits(name, pattern) for name in blocks):
            known = ", ".join([*blocks][:3]) or "none"
            raise ModelError(f"no block of the model is named {pattern!r}; its blocks are {known}, ...")
    ways = {name: activations.way(name) for name in blocks}
    for name, way in ways.items():
        if recomputes_itself(blocks[name]):
            _check_own(name, way, activations.microbatch is not None)
    return ways


def _check_own(name: str, way: ActivationsName, sliced: bool) -> None:
    """Check what a block that checkpoints itself should do."""
    if offloads(way):
        raise ModelError(
            f"the block {name} checkpoints itself, so what it saves can't be offloaded: call "
            "model.gradient_checkpointing_disable(), or let it recompute"
        )
    if sliced and recomputes(way):
        raise ModelError(
            f"the block {name} checkpoints itself, so it can't run in slices: call "
            "model.gradient_checkpointing_disable(), or leave microbatch out"
        )


def treat_blocks(
    points: Iterable[Point],
    ways: Ways,
    slice_rows: int | None,
    collect: Collect,
    saver: Saver | None = None,
    computing: Callable[[Sequence[int]], None] = lambda units: None,
) -> Iterator[Callable[[], None]]:
    """Let blocks do with their activations as was chosen.

    Args:
        ways: from `ways_of`.
        slice_rows: rows of a slice of recomputed blocks.
        collect: takes the gradients of parameters that are summed over slices.
        saver: takes what blocks offload; needed where one does.
        computing: told of the units of a recomputed block whenever it computes, for the first time or again.

    Yields:
        A function that undoes it, for each change; the last one first.
    """
    for point in points:
        way = ways.get(point.name, "keep") if point.block else "keep"
        if recomputes(way) and slice_rows is not None:
            again = partial(computing, point.units)
            yield recompute_in_slices(point.module, point.name, slice_rows, collect, again)
        elif recomputes(way) and not recomputes_itself(point.module):
            yield recompute(point.module, point.name, partial(computing, point.units))
        if offloads(way):
            assert saver is not None
            own = max(point.units)  # those before it are shared with others, and may be open already
            yield offload(point.module, point.name, own, saver)


def recompute(
    module: nn.Module, name: str, computing: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Let a block's backward recompute its forward instead of keeping what it left.

    The block's own hooks stay outside, so that its parameters are open while it is recomputed.

    Args:
        name: of the block, for messages.
        computing: called before each forward: gradients may come to the block by another way than its outputs.

    Returns:
        A function that undoes it.
    """
    return where_recorded(module, Recomputation(module, name, computing))


def offload(module: nn.Module, name: str, unit: int, saver: Saver) -> Callable[[], None]:
    """Let a block hand over what autograd saves in its forward.

    See [Note: Offloaded inputs].

    Returns:
        A function that undoes it.
    """

    def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with saver.call(unit, name):
            return forward(*args, **kwargs)

    return where_recorded(module, run)


def recomputes_itself(block: nn.Module) -> bool:
    """Whether the block's own class checkpoints it already (transformers' ``gradient_checkpointing_enable``)."""
    return bool(getattr(block, "gradient_checkpointing", False))
