"""How many rows of a batch each rank takes, so that all are done at the same time.

[Note: Speeds]
A rank's speed is the rows of a part by the seconds that it was busy with it. It is smoothed, and a new division is
only taken where it would shorten the step by more than `SLACK`: each time a rank gets more rows than ever, its
activations are measured anew, which takes longer than the division saves unless it lasts. The time of such a part, and
of the first, says nothing about speed and is left out.

If a part takes a + b n seconds for n rows, its speed depends on n. Dividing by speeds again and again then comes to
rest where all ranks take the same time, and nowhere else: which is what is wanted.

All of it is a function of times that all ranks know, so that they agree without another word.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

SLACK = 0.05
"""Part of a step's time that a new division must save."""

WEIGHT = 0.5
"""How much of a smoothed speed is the newest."""


def apportion(rows: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Rows for each rank, such that the slowest is done as early as can be.

    Args:
        rows: of the whole batch.
        speeds: rows a second, above 0; among equals the first rank takes what is left over.
    """
    whole = math.fsum(speeds)
    counts = [int(rows * (speed / whole)) for speed in speeds]
    while sum(counts) > rows:  # what rounding may do to very large batches
        counts[counts.index(max(counts))] -= 1
    done = [
        ((count + 1) / speed, rank) for rank, (count, speed) in enumerate(zip(counts, speeds, strict=True))
    ]
    heapq.heapify(done)
    for _ in range(rows - sum(counts)):
        _, rank = done[0]
        counts[rank] += 1
        heapq.heapreplace(done, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)


class Even:
    """All ranks take the same."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def divide(self, rows: int) -> tuple[int, ...]:
        """Rows for each rank."""
        return apportion(rows, [1.0] * self._ranks)

    def note(self, run: Sequence[int], seconds: Sequence[float]) -> None:
        """What each rank ran, and for how long it was busy."""


class BySpeed(Even):
    """Each rank takes what it does in the time that the others need; see [Note: Speeds]."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._smoothed: list[float | None] = [None] * ranks
        self._taken = [1.0] * ranks
        self._most = [0] * ranks

    def divide(self, rows: int) -> tuple[int, ...]:
        return apportion(rows, self._taken)

    def note(self, run: Sequence[int], seconds: Sequence[float]) -> None:
        for rank, (rows, busy) in enumerate(zip(run, seconds, strict=True)):
            if rows > self._most[rank]:
                self._most[rank] = rows
            elif busy > 0:
                before = self._smoothed[rank]
                speed = rows / busy
                self._smoothed[rank] = speed if before is None else before + WEIGHT * (speed - before)
        speeds = [speed for speed in self._smoothed if speed is not None]
        if len(speeds) < len(run):
            return
        rows = sum(run)
        now, then = (_seconds(apportion(rows, division), speeds) for division in (self._taken, speeds))
        if now > (1 + SLACK) * then:
            self._taken = speeds


def _seconds(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Until the last rank is done."""
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))
