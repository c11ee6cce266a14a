"""Whether a block computes each row of a batch by itself, and which of its outputs carry the batch.

[Note: Probe]
Slices give what the whole batch gives only if no row's output depends on another row. That is tried with the first
two rows of a batch, without a graph: each row in turn is made NaN, and then negated, in every floating argument that
carries the batch. A NaN that reaches the other row, or an output that has no row, got there along a dependency, however
small its effect would be with ordinary values: NaN times zero is NaN, so weights that are zero for now hide nothing.
What no value flows along (a choice made for the batch as a whole) shows if the other row's output changes by more than
`TOLERANCE`; less is let pass, since kernels may sum in another order where other rows are routed elsewhere. A choice
that comes out the same in all of these, and would not in others, stays unseen. What the block drew or wrote into
buffers meanwhile is put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import ModelError
from outcore.model.buffers import places_of, untouched
from outcore.model.draws import draws_kept
from outcore.model.slices.cut import Arguments
from outcore.model.slices.surroundings import Autocast
from outcore.model.trees import others_of, take_apart, tensors_of

TOLERANCE = 0.05
"""Of the largest value of an output: what the order of sums may change."""

Layout = tuple[bool, ...]
"""For each output tensor, whether it carries the batch."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """The parts of a block that normalise over the batch while they train."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


def refuse_batch_norm(block: str, norms: list[nn.Module]) -> None:
    """Check that no batch norm takes its statistics from the batch.

    Raises:
        ModelError: one does.
    """
    for norm in norms:
        if norm.training or getattr(norm, "running_mean", None) is None:
            raise ModelError(
                f"the block {block} has a {type(norm).__name__} in training mode, which mixes the samples of a batch: "
                "it can't run in slices; leave microbatch out, or put the norm in eval mode"
            )


def changes_its_input(block: str) -> ModelError:
    """The error for a block that can't be run a second time on the same arguments."""
    return ModelError(
        f"the block {block} changes its input in place, so it can't be recomputed in slices: leave microbatch out"
    )


def outputs_of(block: str, output: Any) -> tuple[Any, list[torch.Tensor]]:
    """A block's output taken apart.

    Raises:
        ModelError: it has tensors in a container that can't be put together again.
    """
    skeleton, tensors = take_apart(output)
    for other in others_of(skeleton):
        if next(tensors_of(other), None) is not None:
            raise ModelError(
                f"the block {block} returns a {type(other).__name__}, whose slices can't be put together: let it "
                "return tensors, tuples, lists or dicts, or leave microbatch out"
            )
    return skeleton, tensors


def examine(
    block: str, module: nn.Module, function: Callable[..., Any], arguments: Arguments
) -> tuple[Layout, bool]:
    """Try a block on two rows; see [Note: Probe].

    Returns:
        Which outputs carry the batch, and whether that and the block's independence are certain: they are not
        where the rows themselves give values that are not finite.

    Raises:
        ModelError: it mixes rows, or changes its arguments.
    """
    places = places_of(module)

    def run(row: int | None, factor: float) -> list[torch.Tensor]:
        with untouched(places):
            return _run(block, function, arguments, row, factor)

    with torch.inference_mode(False), torch.no_grad():
        ordinary = run(None, 1.0)
        layout = tuple(t.dim() > 0 and t.shape[0] == 2 for t in ordinary)
        if not all(map(_finite, ordinary)):
            return layout, False
        for factor in (float("nan"), -1.0):
            for row in (0, 1):
                if _spreads(ordinary, run(row, factor), layout, 1 - row):
                    raise ModelError(
                        f"the block {block} mixes the samples of a batch (one changes what comes out for "
                        "another), so it can't run in slices: leave microbatch out (of torch's own layers, "
                        "batch_first=True takes the batch as dimension 0)"
                    )
    return layout, True


def _run(
    block: str, function: Callable[..., Any], arguments: Arguments, row: int | None, factor: float
) -> list[torch.Tensor]:
    """The outputs for two rows, one of them multiplied by a factor; each time the same is drawn."""
    pieces = []
    for piece, cut in zip(arguments.pieces(0, 2), arguments.by_rows, strict=True):
        copy = piece.detach().clone()
        if cut and copy.is_floating_point() and row is not None:
            copy[row] *= factor
        pieces.append(copy)
    versions = [piece._version for piece in pieces]
    with draws_kept(arguments.device), Autocast.now(arguments.device).again():
        _, tensors = outputs_of(block, arguments.call(function, pieces))
    if [piece._version for piece in pieces] != versions:
        raise changes_its_input(block)
    return tensors


def _spreads(ordinary: list[torch.Tensor], changed: list[torch.Tensor], layout: Layout, other: int) -> bool:
    """Whether a change of one row is found in the other, or in what has no rows."""
    for before, after, carries in zip(ordinary, changed, layout, strict=True):
        if before.shape != after.shape:
            return True
        if before.is_floating_point():
            expected, found = (before[other], after[other]) if carries else (before, after)
            bound = TOLERANCE * float(expected.abs().max()) if expected.numel() else 0.0
            if not bool(((expected - found).abs() <= bound).all()):
                return True
    return False


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
