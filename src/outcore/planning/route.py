"""The order of uses that a simulated run knows: one step, again and again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from outcore.planning.flow import Piece

Tick = tuple[tuple[str, int], tuple[Piece, ...]]
"""What is used, and the pieces it needs on the host."""


class Route:
    """A cycle of ticks. Positions count on from step to step.

    Args:
        ticks: those of one step.
        pieces: how many pieces there are; their keys are below it.
    """

    def __init__(self, ticks: Sequence[Tick], pieces: int) -> None:
        self.ticks = ticks
        self._uses: list[list[int]] = [[] for _ in range(pieces)]
        for position, (_, needs) in enumerate(ticks):
            for piece in needs:
                self._uses[piece.key].append(position)

    def __len__(self) -> int:
        return len(self.ticks)

    def next_use(self, piece: Piece, position: int) -> int:
        """The first tick after ``position`` that needs the piece."""
        uses = self._uses[piece.key]
        if not uses:
            return position + 1000 * len(self.ticks)
        lap, within = divmod(position, len(self.ticks))
        index = bisect_right(uses, within)
        if index < len(uses):
            return lap * len(self.ticks) + uses[index]
        return (lap + 1) * len(self.ticks) + uses[0]

    def keys(self, position: int, limit: int) -> Iterator[tuple[int, tuple[str, int]]]:
        """The next ticks after ``position``: distances and keys."""
        for distance in range(1, limit + 1):
            yield distance, self.ticks[(position + distance) % len(self.ticks)][0]


class Foresight:
    """Walks a route ahead of its position, no further than so many bytes of different pieces."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._tick = 0
        self._index = 0
        self._seen: dict[Piece, int] = {}
        self._bytes = 0
        self._start = 0

    def follow(self, position: int) -> None:
        """The run is at this tick now: what was ahead of it is behind."""
        while self._start <= position:
            if self._start < self._tick:
                for piece in self._route.ticks[self._start % len(self._route)][1]:
                    if self._seen.get(piece) == self._start:
                        del self._seen[piece]
                        self._bytes -= piece.nbytes
            self._start += 1
        if self._tick < self._start:
            self._tick, self._index = self._start, 0
            self._seen.clear()
            self._bytes = 0

    def peek(self, limit: int) -> tuple[int, Piece] | None:
        """The next piece ahead and its tick, if it is within the limit."""
        route = self._route
        for _ in range(len(route)):
            needs = route.ticks[self._tick % len(route)][1]
            while self._index < len(needs):
                piece = needs[self._index]
                if piece in self._seen:
                    self._index += 1
                    continue
                return (self._tick, piece) if self._bytes + piece.nbytes <= limit else None
            if self._tick + 1 - self._start >= len(route):
                return None
            self._tick, self._index = self._tick + 1, 0
        return None

    def take(self, piece: Piece) -> None:
        """What was peeked at is dealt with."""
        self._seen[piece] = self._tick
        self._bytes += piece.nbytes
        self._index += 1
