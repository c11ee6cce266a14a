"""Which of the settings that fit is the fastest.

[Note: Disturbed timings]
Where operators are run for their time, whatever else the machine does then can make one kind of blocks look slow. What
is recomputed runs all that is kept, and a forward again. If it was timed as no slower, one of the two was disturbed:
what is kept is then taken for as much of the other's time as its operations are of the other's. Seen on two shared
cores: kept blocks timed at 0.20 s a step and recomputed ones at 0.15, where they took 0.16 and 0.21.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.planning.outcome import Outcome
from outcore.planning.settings import Settings


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
    """The one whose step is shortest; of equals the one with the largest micro-batch."""
    return min(found, key=lambda fit: (seconds(fit, found), -fit.settings.micro_batch))


def seconds(fit: Fit, found: Sequence[Fit]) -> float:
    """Seconds of a step, by what is known of all that fit; see [Note: Disturbed timings]."""
    guess, own = fit.outcome.seconds, fit.outcome.compute
    for other in found:
        longer = other.outcome.compute
        if _recomputes(other.settings, fit.settings) and longer <= own and other.flops > fit.flops:
            guess = min(guess, fit.outcome.seconds - own + longer * fit.flops / other.flops)
    return guess


def _recomputes(other: Settings, kept: Settings) -> bool:
    """Whether other settings compute what these do, and a forward again. Chunks have no part in that."""
    again = replace(kept.activations, blocks="recompute")
    return kept.activations.blocks == "keep" and other == replace(
        kept, activations=again, chunk_bytes=other.chunk_bytes
    )
