"""Which of the settings that fit is the fastest.

[Note: Disturbed timings]
Where operators are run for their time, whatever else the machine does then can make one kind of blocks look slow. What
is recomputed runs all that is kept, and a forward again. If it was timed as no slower, one of the two was disturbed:
what is kept is then taken for as much of the other's time as its operations are of the other's. Seen on two shared
cores: kept blocks timed at 0.20 s a step and recomputed ones at 0.15, where they took 0.16 and 0.21.

[Note: Passes]
A batch in several micro-batches launches everything as often and computes on fewer rows at a time: it can wait less,
never compute less. If it was timed as computing less, one of the two was disturbed, and it is taken for as much as
fewer passes take. And a plan of more passes has to be faster by more than such plans are off. Seen on an emulated
device: two passes planned at 0.699 s and one at 0.719, where they took 1.13 and 0.90; then at 0.702 and 0.878, where
they took 0.94 and 0.70.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.planning.outcome import Outcome
from outcore.planning.settings import Settings

NEAR = 1.03
"""Of settings that are slower than the fastest by no more than this, the one with the fewest passes is taken."""


@dataclass(frozen=True)
class Fit:
    """Settings that fit.

    Attributes:
        outcome: of the simulated run.
        flops: of matrix products in a step, recomputation included.
    """

    settings: Settings
    outcome: Outcome
    flops: int


def fastest(found: Sequence[Fit]) -> Fit:
    """The one whose step is shortest, or nearly so with fewer passes; see [Note: Passes]."""
    taken = {id(fit): seconds(fit, found) for fit in found}
    near = [fit for fit in found if taken[id(fit)] <= NEAR * min(taken.values())]
    return min(near, key=lambda fit: (-fit.settings.micro_batch, taken[id(fit)]))


def seconds(fit: Fit, found: Sequence[Fit]) -> float:
    """Seconds of a step, by what is known of all that fit; see the notes above."""
    guess, own = fit.outcome.seconds, fit.outcome.compute
    fewer = [other.outcome.compute for other in found if _in_fewer_passes(other.settings, fit.settings)]
    guess += max(0.0, max(fewer, default=own) - own)
    for other in found:
        longer = other.outcome.compute
        if _recomputes(other.settings, fit.settings) and longer <= own and other.flops > fit.flops:
            guess = min(guess, fit.outcome.seconds - own + longer * fit.flops / other.flops)
    return guess


def _in_fewer_passes(other: Settings, split: Settings) -> bool:
    """Whether other settings compute the same in larger micro-batches. Chunks have no part in that."""
    return (
        other.activations == split.activations
        and other.micro_batch > split.micro_batch
        and other.micro_batch * other.accumulate == split.micro_batch * split.accumulate
    )


def _recomputes(other: Settings, kept: Settings) -> bool:
    """Whether other settings compute what these do, and a forward again. Chunks have no part in that."""
    again = replace(kept.activations, blocks="recompute")
    return kept.activations.blocks == "keep" and other == replace(
        kept, activations=again, chunk_bytes=other.chunk_bytes
    )
