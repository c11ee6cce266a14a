"""The order of uses that a simulated run believes in: one step, again and again.

[Note: What a run believes]
A run foresees laps by their key alone (`outcore.trace.schedule`), and all micro-batches of a step have one key. So
what it expects of them is what the last one on record did, and it looks no more than
`Schedule.HORIZON` laps ahead: with many micro-batches it doesn't see the next update. A plan that knew better would
promise traffic that no run reaches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from outcore.chunks.replacers import NEVER
from outcore.planning.flow import Piece
from outcore.trace.schedule import Schedule

Tick = tuple[tuple[str, int], tuple[Piece, ...]]
"""What is used, and the pieces it needs on the host."""


class Route:
    """A cycle of ticks. Positions count on from step to step.

    Args:
        laps: the ticks of one step, lap by lap.
        pieces: how many pieces there are; their keys are below it.
    """

    def __init__(self, laps: Sequence[Sequence[Tick]], pieces: int) -> None:
        self.ticks = [tick for lap in laps for tick in lap]
        self._lap = [number for number, lap in enumerate(laps) for _ in lap]
        self._laps = len(laps)
        self._uses: list[list[int]] = [[] for _ in range(pieces)]
        self._done: set[int] = set()
        for position, (_, needs) in enumerate(self.ticks):
            for piece in needs:
                self._uses[piece.key].append(position)

    def __len__(self) -> int:
        return len(self.ticks)

    def at(self, position: int) -> tuple[Piece, ...]:
        """What the tick at this position needs."""
        return self.ticks[position % len(self.ticks)][1]

    def lap(self, position: int) -> int:
        """The number of the lap at a position, counted from the first step on."""
        step, within = divmod(position, len(self.ticks))
        return step * self._laps + self._lap[within]

    def fulfil(self, position: int) -> None:
        """The tick at this position, which is still to come, has nothing left to do."""
        self._done.add(position)

    def pass_by(self, position: int) -> None:
        """The tick at this position came."""
        self._done.discard(position)

    def is_done(self, position: int) -> bool:
        return position in self._done

    def adopt(self, other: Route) -> None:
        """Take over what of another route is done already."""
        self._done = other._done

    def next_use(self, piece: Piece, position: int) -> int:
        """The first tick after ``position`` that is believed to need the piece; `NEVER` if none is foreseen."""
        uses = self._uses[piece.key]
        if not uses:
            return NEVER
        length = len(self.ticks)
        step, within = divmod(position, length)
        index = bisect_right(uses, within)
        while True:
            if index == len(uses):
                step, index = step + 1, 0
            found = step * length + uses[index]
            if found not in self._done:
                break
            index += 1
        return found if self.lap(found) - self.lap(max(position, 0)) <= Schedule.HORIZON else NEVER

    def keys(self, position: int, limit: int) -> Iterator[tuple[int, tuple[str, int]]]:
        """The next ticks after ``position``: distances and keys."""
        for distance in range(1, limit + 1):
            yield distance, self.ticks[(position + distance) % len(self.ticks)][0]
