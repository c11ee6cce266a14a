"""The traced order of uses, and the future read from it.

[Note: Laps]
A training loop repeats itself in *laps*: a forward with its backward is one, an optimizer step is another,
an evaluation a third. A lap is a sequence of *ticks*; a tick is one use of a unit, or the update of one
chunk, with the chunks it needs. Each lap is recorded whenever it runs, and the last record is what the next
lap with the same key is expected to do. Which lap follows is remembered too, by key and by how many laps of
that key came in a row, so that four micro-batches and a step are foreseen. The schedule follows by a
cursor: a tick that does not come as recorded is looked for further on, and if it is not there the cursor
stays where it is. So a skipped expert, another batch shape or an evaluation in between costs a wrong
prediction at most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from outcore.chunks.chunk import Chunk
from outcore.chunks.replacers import NEVER

LOOKAHEAD = 512
"""The most ticks ahead that `Schedule.upcoming` reports; the pool stops far earlier, at its ceiling."""


@dataclass(frozen=True)
class Tick:
    """One use: its key (what is used) and the chunks it needs on the host."""

    key: Hashable
    needs: tuple[Chunk, ...]


@dataclass(eq=False)
class Lap:
    """One recorded sequence of ticks."""

    ticks: list[Tick]
    positions: dict[Chunk, list[int]] = field(default_factory=dict)
    needs: dict[Hashable, set[Chunk]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, tick in enumerate(self.ticks):
            self.needs.setdefault(tick.key, set()).update(tick.needs)
            for chunk in tick.needs:
                self.positions.setdefault(chunk, []).append(position)

    def __len__(self) -> int:
        return len(self.ticks)

    def first_use(self, chunk: Chunk, start: int, without: set[Hashable]) -> int | None:
        """The first position from ``start`` on that needs the chunk.

        Args:
            without: keys of ticks that don't count; each that was met is taken out.
        """
        positions = self.positions.get(chunk)
        if positions is None:
            return None
        for where in range(bisect_left(positions, start), len(positions)):
            key = self.ticks[positions[where]].key
            if key not in without:
                return positions[where]
            without.discard(key)
        return None


class Schedule:
    """Records laps and foretells uses. Implements `outcore.chunks.replacers.Order`.

    Not thread-safe by itself: callers hold the pool's lock.

    Attributes:
        now: ticks so far.
    """

    HORIZON = 4
    """Laps beyond the current one in which a next use is looked for."""

    def __init__(self) -> None:
        self._laps: dict[Hashable, Lap] = {}
        self._follows: dict[tuple[Hashable, int], Hashable] = {}
        self._latest: dict[Hashable, Hashable] = {}
        self._key: Hashable = None
        self._count = 0
        self._cursor = 0
        self._seen: list[Tick] = []
        self._missed = False
        self._fulfilled: set[Hashable] = set()
        self._revised: set[Chunk] | None = None
        self.now = 0

    @property
    def known(self) -> bool:
        """Whether the current lap was recorded before."""
        return self._key in self._laps

    @property
    def repeated(self) -> Lap | None:
        """The record of the current lap, if the next one is expected to be the same again."""
        return self._laps.get(self._key) if self._latest.get(self._key) == self._key else None

    def begin(self, key: Hashable) -> None:
        """A new lap starts; the one before it, if any, is taken over as the record of its key."""
        self._finish()
        if self._key is not None:
            self._follows[self._key, self._count] = key
            self._latest[self._key] = key
        self._count = self._count + 1 if key == self._key else 0
        self._revised = None
        self._key = key
        self._cursor = 0
        self._seen = []
        self._missed = False

    def _finish(self) -> None:
        if self._key is None or not self._seen:
            return
        record = self._laps.get(self._key)
        if record is None or self._missed or len(record) != len(self._seen):
            self._laps[self._key] = Lap(self._seen)

    def advance(self, key: Hashable, needs: Sequence[Chunk]) -> None:
        """The next tick happens now."""
        tick = Tick(key, tuple(needs))
        self._seen.append(tick)
        self.now += 1
        if key in self._fulfilled:
            self._fulfilled.discard(key)
            self._revise(key)
        lap = self._laps.get(self._key)
        if lap is None:
            return
        if self._cursor < len(lap) and lap.ticks[self._cursor] == tick:
            self._cursor += 1
            if self._revised is not None:
                self._revised.update(needs)
            return
        self._revised = None
        self._missed = True
        for position in range(self._cursor, len(lap)):
            if lap.ticks[position].key == key:
                self._cursor = position + 1
                return

    def fulfil(self, key: Hashable) -> None:
        """The next tick with this key has nothing left to do when it comes."""
        self._fulfilled.add(key)
        self._revise(key)

    def _revise(self, key: Hashable) -> None:
        """What ticks with this key need has another next use than before."""
        if self._revised is not None:
            for lap in self._laps.values():
                self._revised |= lap.needs.get(key, set())

    def revised(self) -> set[Chunk] | None:
        changed, self._revised = self._revised, set()
        return changed

    def _ahead(self) -> Iterator[tuple[int, int, Lap]]:
        """Laps to come: ticks before the lap's start (from now), first position still to come, the lap."""
        key, count, distance, start = self._key, self._count, 1, self._cursor
        for _ in range(self.HORIZON + 1):
            lap = self._laps.get(key)
            if lap is None:
                return
            yield distance - start, start, lap
            distance += len(lap) - start
            start = 0
            follower = self._follows.get((key, count), self._latest.get(key))
            if follower is None:
                return
            count = count + 1 if follower == key else 0
            key = follower

    def next_use(self, chunk: Chunk) -> int:
        without = set(self._fulfilled)
        for base, start, lap in self._ahead():
            position = lap.first_use(chunk, start, without)
            if position is not None:
                return base + position
        return NEVER

    def upcoming(self) -> Iterator[tuple[int, Chunk]]:
        seen: set[Chunk] = set()
        without = set(self._fulfilled)
        for base, start, lap in self._ahead():
            for position in range(start, len(lap)):
                if base + position > LOOKAHEAD:
                    return
                if lap.ticks[position].key in without:
                    without.discard(lap.ticks[position].key)
                    continue
                for chunk in lap.ticks[position].needs:
                    if chunk not in seen:
                        seen.add(chunk)
                        yield base + position, chunk

    def upcoming_keys(self, limit: int) -> Iterator[Hashable]:
        """The keys of the next ``limit`` ticks."""
        for _, start, lap in self._ahead():
            for position in range(start, len(lap)):
                if limit <= 0:
                    return
                limit -= 1
                yield lap.ticks[position].key
