"""Which chunk leaves the host first.

[Note: Ranks]
A host of 256 GiB holds tens of thousands of chunks; to look at all of them for each that leaves would take longer than
the disk takes to bring the next. So candidates lie in a list sorted by rank. A rank is made when a chunk may leave from
now on (`Replacer.offer`), and made anew where the belief about its next use changed (`Order.revised`). What is found at
the end and may not leave any more is dropped: it is offered again when it may.

A list and not a heap, for the first few are looked at far more often than one goes in: where a simulated run of 175B
parameters spends its time, ten are looked at for each that is offered, and a heap pays for each of them twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import count
from typing import Protocol

from outcore.chunks.chunk import Chunk, Residence

NEVER = 1 << 60
"""The distance, in ticks, of a use that is not foreseen."""


class Order(Protocol):
    """What the future is believed to hold. Wrong beliefs cost speed, never correctness."""

    @property
    def now(self) -> int:
        """Ticks so far, which is the number of the last."""

    def next_use(self, chunk: Chunk) -> int:
        """Ticks until the chunk is used again, `NEVER` if that is not known."""

    def revised(self) -> Iterable[Chunk] | None:
        """The chunks whose next use is not the tick that it was when this was last asked; ``None`` if any may be."""

    @property
    def epoch(self) -> int:
        """Another number whenever coming ticks are not those that were believed to come."""

    def excused(self) -> Iterable[int]:
        """The numbers of coming ticks that have nothing left to do since this was last asked."""

    def needs(self, distance: int) -> Sequence[Chunk] | None:
        """What the tick that comes in so many needs, nothing if all it is for is done; ``None`` if it isn't known."""


Rank = tuple[int, ...]
"""The largest leaves first."""


class Replacer(ABC):
    """Orders chunks that may leave; see [Note: Ranks]."""

    def __init__(self) -> None:
        self._entries: dict[Chunk, tuple[Rank, int, Chunk]] = {}
        self._sorted: list[tuple[Rank, int, Chunk]] = []  # may hold some that are out of date
        self._number = count(0, -1)

    @abstractmethod
    def _rank(self, chunk: Chunk) -> Rank:
        """The chunk's rank now."""

    @abstractmethod
    def _is_beyond(self, rank: Rank, beyond: int) -> bool:
        """Whether a chunk of this rank is needed later than ``beyond`` ticks from now."""

    def _revised(self) -> Iterable[Chunk] | None:
        """Whose ranks may have changed since they were made; ``None`` if any may."""
        return ()

    def offer(self, chunk: Chunk) -> None:
        """The chunk may leave from now on."""
        rank, known = self._rank(chunk), self._entries.get(chunk)
        if known is None or known[0] != rank:
            entry = self._entries[chunk] = rank, next(self._number), chunk
            insort(self._sorted, entry)

    def leaving(self, may_leave: Callable[[Chunk], bool], beyond: int) -> Generator[Chunk, None, None]:
        """Chunks to evict, the best first, as long as they are needed later than ``beyond`` ticks from now.

        Args:
            may_leave: whether a chunk that was offered may still leave.
        """
        self._revise(may_leave)
        place = len(self._sorted)
        while place:
            place -= 1
            entry = self._sorted[place]
            rank, _, chunk = entry
            if self._entries.get(chunk) is not entry:
                del self._sorted[place]
            elif not may_leave(chunk):
                del self._sorted[place], self._entries[chunk]
            elif not self._is_beyond(rank, beyond):
                return
            else:
                yield chunk
                if (
                    place >= len(self._sorted) or self._sorted[place] is not entry
                ):  # some were offered meanwhile
                    place = bisect_left(self._sorted, entry)

    def _revise(self, may_leave: Callable[[Chunk], bool]) -> None:
        changed = self._revised()
        if changed is None or len(self._sorted) > 64 + 2 * len(self._entries):
            ranked = [(self._rank(chunk), chunk) for chunk in self._entries if may_leave(chunk)]
            self._entries = {chunk: (rank, next(self._number), chunk) for rank, chunk in ranked}
            self._sorted = sorted(self._entries.values())
            return
        for chunk in changed:
            if chunk in self._entries:
                self.offer(chunk)


class Belady(Replacer):
    """Evict what is used furthest in the future (Belady 1966); optimal where the order is known.

    Among equals a clean chunk goes before a dirty one, whose bytes would have to be written, and then the least
    recently used first.
    """

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def _rank(self, chunk: Chunk) -> Rank:
        distance = self._order.next_use(chunk)
        tick = NEVER if distance >= NEVER else self._order.now + distance
        return tick, chunk.residence is Residence.CLEAN, -chunk.last_use

    def _is_beyond(self, rank: Rank, beyond: int) -> bool:
        return (NEVER if rank[0] >= NEVER else rank[0] - self._order.now) > beyond

    def _revised(self) -> Iterable[Chunk] | None:
        return self._order.revised()


class LRU(Replacer):
    """Evict what was used longest ago. The yardstick for `Belady`: on a cyclic scan it saves nothing."""

    def _rank(self, chunk: Chunk) -> Rank:
        return (-chunk.last_use,)

    def _is_beyond(self, rank: Rank, beyond: int) -> bool:
        return beyond < 0  # it can't tell what is needed later, and two reads could chase each other
