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

[Note: The forecast]
Ticks have numbers, counted from the first. While all goes as recorded, the forecast says which record holds each number
to come; it is made anew, and the epoch counted on, where a lap begins or a tick is another one. A tick that is over
ahead of its time is excused by its number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from outcore.chunks.chunk import Chunk
from outcore.chunks.replacers import NEVER


@dataclass(frozen=True)
class Tick:
    """One use: its key (what is used) and the chunks it needs on the host."""

    key: Hashable
    needs: tuple[Chunk, ...]


@dataclass(eq=False)
class Lap:
    """One recorded sequence of ticks."""

    ticks: list[Tick]
    uses: dict[Chunk, list[int]] = field(default_factory=dict)
    positions: dict[Hashable, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, tick in enumerate(self.ticks):
            self.positions.setdefault(tick.key, []).append(position)
            for chunk in tick.needs:
                self.uses.setdefault(chunk, []).append(position)

    def __len__(self) -> int:
        return len(self.ticks)


@dataclass(frozen=True)
class Coming:
    """A lap as it is expected to come, or the rest of one.

    Attributes:
        first: the number of its first tick; those up to now are past.
    """

    first: int
    lap: Lap

    def next_of(self, positions: Sequence[int], now: int, excused: Container[int] = ()) -> int | None:
        """The number of the first of these ticks that is still to come and is not excused."""
        for index in range(bisect_left(positions, now + 1 - self.first), len(positions)):
            number = self.first + positions[index]
            if number not in excused:
                return number
        return None


class Schedule:
    """Records laps and foretells uses. Implements `outcore.chunks.replacers.Order`.

    Not thread-safe by itself: callers hold the pool's lock.

    Attributes:
        now: ticks so far.
        epoch: counts how often the forecast changed.
    """

    IN_A_ROW = 1024
    """Laps of one key in a row that are told apart: more micro-batches than that end where nobody foresees it."""

    HORIZON = 4
    """Laps beyond the current one in which a next use is looked for."""

    LONGEST = 1 << 16
    """Ticks after which a lap that nobody ends begins anew, so that its record doesn't grow for ever."""

    def __init__(self) -> None:
        self._laps: dict[Hashable, Lap] = {}
        self._follows: dict[tuple[Hashable, int], Hashable] = {}
        self._latest: dict[Hashable, Hashable] = {}
        self._key: Hashable = None
        self._count = 0
        self._cursor = 0
        self._seen: list[Tick] = []
        self._missed = False
        self._fulfilled: dict[Hashable, int | None] = {}  # and the number of the tick, if it is foreseen
        self._excused: set[int] = set()
        self._news: list[int] = []
        self._forecast: list[Coming] = []
        self._revised: dict[Chunk, None] | None = None  # in an order that doesn't change from run to run
        self.now = self.epoch = 0

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
        self._count = self._counted(self._count, self._key, key)
        self._key = key
        self._cursor = 0
        self._seen = []
        self._missed = False
        self._foresee()

    def _counted(self, count: int, key: Hashable, follower: Hashable) -> int:
        """How many laps of its key came right before a follower. A run of millions keeps no more of them."""
        return min(count + 1, self.IN_A_ROW) if follower == key else 0

    def _finish(self) -> None:
        if self._key is None or not self._seen:
            return
        record = self._laps.get(self._key)
        if record is None or self._missed or len(record) != len(self._seen):
            self._laps[self._key] = Lap(self._seen)

    def advance(self, key: Hashable, needs: Sequence[Chunk]) -> None:
        """The next tick happens now."""
        if len(self._seen) >= self.LONGEST:
            self.begin(self._key)
        tick = Tick(key, tuple(needs))
        self._seen.append(tick)
        self.now += 1
        lap = self._laps.get(self._key)
        expected = lap is not None and self._cursor < len(lap) and lap.ticks[self._cursor] == tick
        if expected:
            self._cursor += 1
            if self._revised is not None:
                self._revised.update(dict.fromkeys(needs))
        if key in self._fulfilled:
            self._excuse(key, self._fulfilled.pop(key))
        if lap is None or expected:
            return
        self._missed = True
        for position in range(self._cursor, len(lap)):
            if lap.ticks[position].key == key:
                self._cursor = position + 1
                break
        self._foresee()

    def fulfil(self, key: Hashable) -> None:
        """The next tick with this key has nothing left to do when it comes."""
        if key not in self._fulfilled:
            self._fulfilled[key] = number = self._find(key)
            self._excuse(key, number)
            if number is not None:
                self._news.append(number)

    def _excuse(self, key: Hashable, number: int | None) -> None:
        """A tick counts no more, or is over: what ticks with this key need has another next use than before."""
        if number is not None:
            self._excused ^= {number}
            if self._revised is not None:
                for coming in self._forecast:
                    for position in coming.lap.positions.get(key, ()):
                        self._revised.update(dict.fromkeys(coming.lap.ticks[position].needs))

    def _find(self, key: Hashable) -> int | None:
        """The number of the next tick with this key, if one is foreseen."""
        for coming in self._forecast:
            number = coming.next_of(coming.lap.positions.get(key, ()), self.now)
            if number is not None:
                return number
        return None

    def revised(self) -> dict[Chunk, None] | None:
        changed, self._revised = self._revised, {}
        return changed

    def excused(self) -> list[int]:
        news, self._news = self._news, []
        return news

    def _foresee(self) -> None:
        """Make the forecast anew: the rest of this lap, and those that are expected to follow."""
        self.epoch += 1
        self._revised = None
        self._forecast = []
        key, count, first = self._key, self._count, self.now + 1 - self._cursor
        for _ in range(self.HORIZON + 1):
            lap = self._laps.get(key)
            if lap is None:
                break
            self._forecast.append(Coming(first, lap))
            first += len(lap)
            follower = self._follows.get((key, count), self._latest.get(key))
            if follower is None:
                break
            count = self._counted(count, key, follower)
            key = follower
        self._fulfilled = {key: self._find(key) for key in self._fulfilled}
        self._excused = {number for number in self._fulfilled.values() if number is not None}

    def next_use(self, chunk: Chunk) -> int:
        for coming in self._forecast:
            positions = coming.lap.uses.get(chunk)
            number = None if positions is None else coming.next_of(positions, self.now, self._excused)
            if number is not None:
                return number - self.now
        return NEVER

    def needs(self, distance: int) -> Sequence[Chunk] | None:
        number = self.now + distance
        for coming in self._forecast:
            if number < coming.first + len(coming.lap):
                return () if number in self._excused else coming.lap.ticks[number - coming.first].needs
        return None

    def upcoming_keys(self, limit: int) -> Iterator[Hashable]:
        """The keys of the next ``limit`` ticks."""
        for coming in self._forecast:
            for position in range(max(0, self.now + 1 - coming.first), len(coming.lap)):
                if limit <= 0:
                    return
                limit -= 1
                yield coming.lap.ticks[position].key
