"""Which chunk leaves the host first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from outcore.chunks.chunk import Chunk, Residence

NEVER = 1 << 60
"""The distance, in ticks, of a use that is not foreseen."""


class Order(Protocol):
    """What the future is believed to hold. Wrong beliefs cost speed, never correctness."""

    def next_use(self, chunk: Chunk) -> int:
        """Ticks until the chunk is used again, `NEVER` if that is not known."""

    def upcoming(self) -> Iterable[tuple[int, Chunk]]:
        """The chunks needed after the current tick, soonest first, with their distance in ticks."""


class Replacer(Protocol):
    """Chooses a victim among chunks that may leave."""

    def victim(self, candidates: Iterable[Chunk], beyond: int) -> Chunk | None:
        """The chunk to evict, or ``None`` if none is needed later than ``beyond`` ticks from now."""


class Belady:
    """Evict what is used furthest in the future (Belady 1966); optimal where the order is known.

    Among equals the least recently used goes first, and a clean chunk before a dirty one, whose bytes
    would have to be written.
    """

    def __init__(self, order: Order) -> None:
        self._order = order

    def victim(self, candidates: Iterable[Chunk], beyond: int) -> Chunk | None:
        best: Chunk | None = None
        best_rank = (beyond, False, NEVER)
        for chunk in candidates:
            rank = (self._order.next_use(chunk), chunk.residence is Residence.CLEAN, -chunk.last_use)
            if rank[0] > beyond and (best is None or rank > best_rank):
                best, best_rank = chunk, rank
        return best


class LRU:
    """Evict what was used longest ago. The yardstick for `Belady`: on a cyclic scan it saves nothing."""

    def victim(self, candidates: Iterable[Chunk], beyond: int) -> Chunk | None:
        if (
            beyond >= 0
        ):  # for a prefetch: it can't tell what is needed later, and two reads could chase each other
            return None
        return min(candidates, key=lambda chunk: chunk.last_use, default=None)
