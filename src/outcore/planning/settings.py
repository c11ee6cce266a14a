"""What a plan may decide, and in which order it is tried.

[Note: Search]
Settings that change a step's time are few: the micro-batch (a step's sequences in fewer passes fetch parameters less
often, and hold more activations), whether blocks are recomputed (which makes room for chunks, and costs a forward), and
the size of chunks. Each is simulated with all of the budgets: what is left of them holds the chunks that are used
soonest, so there is no split to search for. What was fixed by the caller stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outcore.model.policies import ActivationsName

CHUNK_SIZES = (8 << 20, 32 << 20)
"""Sizes of chunks that are tried: the default of `outcore.offload`, and one for wide models."""


@dataclass(frozen=True)
class Settings:
    """What a search decides."""

    micro_batch: int
    accumulate: int
    activations: ActivationsName
    chunk_bytes: int

    def __str__(self) -> str:
        turns = f" x {self.accumulate}" if self.accumulate > 1 else ""
        kept = "kept" if self.activations == "keep" else "recomputed"
        return f"micro-batches of {self.micro_batch}{turns}, activations {kept}"


def candidates(
    sequences: int,
    accumulate: int,
    micro_batch: int | None,
    activations: ActivationsName | None,
    chunk_bytes: int | None,
) -> Iterator[Settings]:
    """Settings to try, those that hold least first within each micro-batch, the largest micro-batch first."""
    sizes = [micro_batch] if micro_batch else _sizes(sequences)
    ways: Sequence[ActivationsName] = (activations,) if activations else ("keep", "recompute")
    for size in sizes:
        for way in ways:
            yield Settings(size, sequences // size, way, chunk_bytes or CHUNK_SIZES[0])


def _sizes(sequences: int) -> list[int]:
    """Divisors of a step, from the largest on; a few of them if there are many."""
    divisors = [d for d in range(sequences, 0, -1) if sequences % d == 0]
    return [d for k, d in enumerate(divisors) if k == 0 or sequences // d in _POWERS or d == 1]


_POWERS = frozenset(1 << k for k in range(40))


def dominates(known: Settings, other: Settings) -> bool:
    """Whether settings that fit make others pointless: a larger micro-batch with the same activations kept moves no
    more bytes and computes no more."""
    return (
        known.chunk_bytes == other.chunk_bytes
        and known.activations == other.activations
        and known.micro_batch > 2 * other.micro_batch
    )
