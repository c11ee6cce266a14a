"""What a plan may decide, and in which order it is tried.

[Note: Search]
Settings that change a step's time are few: the micro-batch (a step's sequences in fewer passes fetch parameters less
often, and hold more activations), whether blocks are recomputed (which makes room for chunks, and costs a forward),
whether recomputed blocks run in slices (one pass for the whole step with the activations of a slice), and the size of
chunks. Each is simulated with all of the budgets: what is left of them holds the chunks that are used soonest, so there
is no split to search for. What was fixed by the caller stays as it is. To offload activations is tried where nothing
fits without: it costs links what recomputing costs the device that computes, and most steps wait for links.

Of slices one size is tried for each pass: the fewest sequences with `SLICE_TOKENS`, for which matrix products are large
enough; more would hold more and fetch no less. The loss is in slices with them, where the model's can be: with its
logits kept, which computes less, or multiplied again, which holds less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outcore.model.policies import Activations

CHUNK_SIZES = (8 << 20, 32 << 20)
"""Sizes of chunks that are tried: the default of `outcore.offload`, and one for wide models."""

SLICE_TOKENS = 1024
"""Tokens of a slice from which on more gain nothing."""


@dataclass(frozen=True)
class Settings:
    """What a search decides.

    Attributes:
        micro_batch: sequences of one forward and backward.
        accumulate: forwards and backwards of a step.
        activations: what blocks do with theirs, and in which slices they run.
        chunk_bytes: the most bytes of parameters that move as one piece.
    """

    micro_batch: int
    accumulate: int
    activations: Activations
    chunk_bytes: int

    def __str__(self) -> str:
        turns = f" x {self.accumulate}" if self.accumulate > 1 else ""
        return f"micro-batches of {self.micro_batch}{turns}, activations {said(self.activations)}"


def said(activations: Activations) -> str:
    """A policy in words."""
    found = _SAID[activations.blocks]
    if activations.microbatch is not None:
        found += f" in slices of {activations.microbatch}"
    if activations.logits == "keep":
        found += ", logits kept"
    return f"{found}, single blocks otherwise" if activations.units else found


_SAID = {
    "keep": "kept",
    "recompute": "recomputed",
    "offload": "offloaded",
    "recompute+offload": "recomputed from offloaded inputs",
}


def candidates(
    sequences: int,
    micro_batch: int | None,
    activations: Sequence[Activations] | None,
    chunk_bytes: int | None,
    tokens: int = 1,
    offloaded: bool = False,
    sliced_loss: bool = False,
) -> Iterator[Settings]:
    """Settings to try, those that compute least first within each micro-batch, the largest micro-batch first.

    Args:
        offloaded: only ways that offload activations, in place of those that don't.
        tokens: of a sequence.
        sliced_loss: whether the loss can run in slices.
    """
    sizes = [micro_batch] if micro_batch else _sizes(sequences)
    for size in sizes:
        if activations is not None:
            ways = list(activations)
        elif offloaded:
            ways = [Activations("offload"), Activations("recompute+offload")]
        else:
            ways = [Activations("keep"), Activations("recompute")]
            part = slice_rows(size, tokens)
            if part is not None:
                kept = [Activations("recompute", part, logits="keep")] if sliced_loss else []
                ways += [*kept, Activations("recompute", part)]
        for way in ways:
            yield Settings(size, sequences // size, way, chunk_bytes or CHUNK_SIZES[0])


def slice_rows(sequences: int, tokens: int) -> int | None:
    """Sequences of the slices that are tried for a pass; ``None`` where none is smaller than it.

    Args:
        tokens: of a sequence.
    """
    return next((d for d in range(1, sequences) if sequences % d == 0 and d * tokens >= SLICE_TOKENS), None)


def _sizes(sequences: int) -> list[int]:
    """Divisors of a step, from the largest on; a few of them if there are many."""
    divisors = [d for d in range(sequences, 0, -1) if sequences % d == 0]
    return [d for k, d in enumerate(divisors) if k == 0 or sequences // d in _POWERS or d == 1]


_POWERS = frozenset(1 << k for k in range(40))


def dominates(known: Settings, other: Settings) -> bool:
    """Whether settings that fit make others pointless: a larger micro-batch with the same activations kept moves no
    more bytes and computes no more. In slices a larger one holds hardly more, so that any will do."""
    mine, others = known.activations, other.activations
    sliced = mine.microbatch is not None
    return (
        known.chunk_bytes == other.chunk_bytes
        and sliced == (others.microbatch is not None)
        and replace(mine, microbatch=others.microbatch) == others
        and known.micro_batch > (1 if sliced else 2) * other.micro_batch
    )
