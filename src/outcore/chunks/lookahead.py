"""What is needed soon, as far ahead as there is room for, and what of it is not on the host.

[Note: One walk]
A pool looks at what comes whenever something ends: a use, a read, a write. To walk through all of it each time would
take longer than what it is about (with 6,400 chunks 4 ms of walking for each 8 MiB, which a disk brings in 3). So the
walk goes on where it stopped, and is told what came to the host and what left it. It begins anew where the order turns
out to be another than it was believed to be (`Order.epoch`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count

from outcore.chunks.chunk import Chunk, Residence
from outcore.chunks.replacers import Order

FURTHEST = 512
"""The most ticks that are looked ahead."""

NEAR = 2
"""Ticks whose needs are looked at whatever they take."""


class Lookahead:
    """The chunks that are used next, each once, by the tick of its next use. Used under the pool's lock alone.

    Attributes:
        absent: bytes of them that are not on the host.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch: int | None = None
        self._when: dict[Chunk, int] = {}
        self._away: dict[Chunk, None] = {}
        self._walked: deque[tuple[int, Sequence[Chunk]]] = deque()
        self._next = self._index = 0  # where the walk stopped: the tick, and which of the chunks it needs
        self._below: list[tuple[int, int, Chunk]] = []  # those on disk, as a heap; may be out of date
        self._number = count()
        self._bytes = self.absent = 0

    @property
    def reach(self) -> int:
        """Ticks from now to where the walk stopped."""
        return self._next - self._order.now

    def follow(self, limit: int) -> None:
        """Catch up with the clock, then walk on until different chunks of so many bytes lie ahead."""
        now = self._order.now
        excused = self._order.excused()
        if self._epoch != self._order.epoch:
            self._begin_anew()
        else:
            self._excuse(excused)
        while self._walked and self._walked[0][0] <= now:
            tick, needs = self._walked.popleft()
            for chunk in needs:
                if self._when.get(chunk) == tick:
                    self._revise(chunk)
        if self._next <= now:
            self._next, self._index = now + 1, 0
        while self._next - now <= FURTHEST:
            coming = self._order.needs(self._next - now)
            if coming is None or not self._walk(coming, limit, self._next - now <= NEAR):
                return
            self._next, self._index = self._next + 1, 0

    def _excuse(self, ticks: Iterable[int]) -> None:
        """These ticks need nothing any more."""
        if self._walked:
            first = self._walked[0][0]
            for tick in ticks:
                if 0 <= tick - first < len(self._walked):
                    for chunk in self._walked[tick - first][1]:
                        if self._when.get(chunk) == tick:
                            self._revise(chunk)

    def _walk(self, needs: Sequence[Chunk], limit: int, near: bool) -> bool:
        """Take in what the next tick needs; false if that is too much."""
        if not self._walked or self._walked[-1][0] != self._next:
            self._walked.append((self._next, needs))
        while self._index < len(needs):
            chunk = needs[self._index]
            if chunk not in self._when:
                if self._bytes + chunk.nbytes > limit and not near:
                    return False
                self._when[chunk] = self._next
                self._bytes += chunk.nbytes
                self._look(chunk)
            self._index += 1
        return True

    def _begin_anew(self) -> None:
        self._epoch = self._order.epoch
        for held in (self._when, self._away, self._walked, self._below):
            held.clear()
        self._next = self._index = self._bytes = self.absent = 0

    def _revise(self, chunk: Chunk) -> None:
        """The chunk is used at another tick than was believed: if it lies ahead, that is when; if not, never mind."""
        self.came(chunk)
        tick = self._order.now + self._order.next_use(chunk)
        if self._walked and tick <= self._walked[-1][0]:  # the last may be walked through in part
            self._when[chunk] = tick
            self._look(chunk)
        else:
            del self._when[chunk]
            self._bytes -= chunk.nbytes

    def _look(self, chunk: Chunk) -> None:
        """Note where a chunk of the window is."""
        if chunk.on_host:
            return
        if chunk not in self._away:
            self._away[chunk] = None
            self.absent += chunk.nbytes
        if chunk.residence is Residence.DISK:
            heapq.heappush(self._below, (self._when[chunk], next(self._number), chunk))

    def left(self, chunk: Chunk) -> None:
        """A chunk left the host, perhaps because it is needed later than was believed."""
        if chunk in self._when:
            self._revise(chunk)

    def came(self, chunk: Chunk) -> None:
        """A chunk came to the host."""
        if chunk in self._away:
            del self._away[chunk]
            self.absent -= chunk.nbytes

    def soonest(self) -> tuple[int, Chunk] | None:
        """What of it is on disk and needed first, and in how many ticks. What could not be read is left out."""
        while self._below:
            tick, _, chunk = self._below[0]
            if self._when.get(chunk) == tick and chunk.residence is Residence.DISK and chunk.error is None:
                return tick - self._order.now, chunk
            heapq.heappop(self._below)
        return None
