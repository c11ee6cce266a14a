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

from outcore.chunks.lookahead import FURTHEST, NEAR
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


class Foresight:
    """Walks a route ahead of its position, no further than so many bytes of different pieces."""

    def __init__(self, route: Route, start: int = 0) -> None:
        self._route = route
        self._tick = start
        self._index = 0
        self._seen: dict[Piece, int] = {}
        self._lost: dict[Piece, int] = {}
        self._bytes = 0
        self._start = start

    def follow(self, position: int) -> None:
        """The run is at this tick now: what was ahead of it is behind."""
        while self._start <= position:
            if self._start < self._tick:
                for piece in self._route.ticks[self._start % len(self._route)][1]:
                    if self._seen.get(piece) == self._start:
                        del self._seen[piece]
                        self._bytes -= piece.nbytes
            self._start += 1
        if self._lost:
            self._lost = {piece: tick for piece, tick in self._lost.items() if tick > position}
        if self._tick < self._start:
            self._tick, self._index = self._start, 0
            self._seen.clear()
            self._bytes = 0

    def fulfil(self, position: int) -> None:
        """The tick at this position counts no more; what it needed counts where it is needed next."""
        self._lost = {piece: tick for piece, tick in self._lost.items() if tick != position}
        if not self._start <= position <= self._tick:
            return
        for piece in self._route.ticks[position % len(self._route)][1]:
            if self._seen.get(piece) == position:
                following = self._route.next_use(piece, position)
                if following < self._tick:
                    self._seen[piece] = following
                else:
                    del self._seen[piece]
                    self._bytes -= piece.nbytes
        if position == self._tick:
            self._index = 0

    def lose(self, piece: Piece) -> None:
        """A piece that was dealt with left the host."""
        tick = self._seen.pop(piece, None)
        if tick is not None:
            self._bytes -= piece.nbytes
            self._lost[piece] = tick

    def peek(self, limit: int, position: int) -> tuple[int, Piece] | None:
        """The next piece ahead and its tick, if it is near, or within the limit and foreseen."""
        if self._lost:
            piece = min(self._lost, key=self._lost.__getitem__)
            tick = self._lost[piece]
            near = tick - position <= NEAR
            return (tick, piece) if near or self._bytes + piece.nbytes <= limit else None
        route = self._route
        lap = route.lap(max(0, self._start - 1))
        while self._tick - self._start < FURTHEST and route.lap(self._tick) - lap <= Schedule.HORIZON:
            needs = () if route.is_done(self._tick) else route.ticks[self._tick % len(route)][1]
            while self._index < len(needs):
                piece = needs[self._index]
                if piece in self._seen:
                    self._index += 1
                    continue
                near = self._tick - position <= NEAR
                return (self._tick, piece) if near or self._bytes + piece.nbytes <= limit else None
            self._tick, self._index = self._tick + 1, 0
        return None

    def take(self, piece: Piece) -> None:
        """What was peeked at is dealt with."""
        self._bytes += piece.nbytes
        if piece in self._lost:
            self._seen[piece] = self._lost.pop(piece)
            return
        self._seen[piece] = self._tick
        self._index += 1
