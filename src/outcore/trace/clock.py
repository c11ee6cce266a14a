"""The clock: every use passes through it, is recorded by the schedule, and lets the pool read ahead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outcore.chunks.chunk import Chunk
from outcore.chunks.pool import Pool
from outcore.trace.schedule import Schedule


class Clock:
    """Joins a schedule and the pool it foretells for, under the pool's lock.

    Attributes:
        count: laps and ticks so far: where it stands still, nobody trains.
        now: the key of the newest tick.
    """

    def __init__(self, schedule: Schedule, pool: Pool) -> None:
        self._schedule = schedule
        self._pool = pool
        self.count = 0
        self.now: Hashable = None

    def lap(self, key: Hashable) -> None:
        """A lap begins."""
        with self._pool.lock:
            self.count += 1
            self._schedule.begin(key)
            self._pool.advance()

    def tick(self, key: Hashable, needs: Sequence[Chunk]) -> None:
        """A use begins; called before its guard is asked for."""
        with self._pool.lock:
            self.count += 1
            self.now = key
            self._schedule.advance(key, needs)
            self._pool.advance(needs)

    def fulfil(self, key: Hashable) -> None:
        """A use was over ahead of its tick. Callable from any thread."""
        with self._pool.lock:
            self._schedule.fulfil(key)

    def upcoming(self, limit: int) -> list[tuple[int, Hashable]]:
        """The ticks expected next: how many ticks from now, and their keys."""
        with self._pool.lock:
            return list(enumerate(self._schedule.upcoming_keys(limit), start=1))

    def next_use(self, chunk: Chunk) -> int:
        """Ticks until a chunk is expected to be used again."""
        with self._pool.lock:
            return self._schedule.next_use(chunk)
