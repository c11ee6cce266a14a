"""Whom to evict in a simulated run: Belady over the known order, then a clean one, then the least recently used.

The choice of `outcore.chunks.replacers.Belady`. A heap stands for the pool's search, because a plan runs through many
more settings than a run. What is in it may be out of date: an entry counts if the piece still is as it was when it was
offered.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from outcore.chunks.chunk import Residence
from outcore.planning.flow import Piece
from outcore.planning.route import Route


class Victims:
    """Pieces that may leave the host.

    Args:
        route: the order that is believed in.
        writable: whether there is a disk for what is dirty.
    """

    def __init__(self, route: Route, writable: bool) -> None:
        self._route = route
        self._writable = writable
        self._heap: list[tuple[int, bool, int, int, Piece]] = []

    def offer(self, piece: Piece) -> None:
        """A piece that nobody holds; nothing happens if its bytes are on their way."""
        if piece.residence in (Residence.CLEAN, Residence.DIRTY):
            dirty = piece.residence is Residence.DIRTY
            heapq.heappush(self._heap, (-piece.next, dirty, piece.last, piece.key, piece))

    def take(self, beyond: int, position: int, needed: Collection[Piece]) -> Piece | None:
        """What is used last.

        Args:
            beyond: a tick; what is used by then is not taken.
            position: of the run.
            needed: pieces of the present tick. They are taken only on demand, with a negative ``beyond``, and last.
        """
        kept: list[Piece] = []
        found = self._search(beyond, position, needed, kept)
        if found is None and beyond < 0 and kept:
            found = kept.pop(0)
        for piece in kept:
            self.offer(piece)
        return found

    def _search(
        self, beyond: int, position: int, needed: Collection[Piece], kept: list[Piece]
    ) -> Piece | None:
        heap = self._heap
        while heap:
            key, _, last, _, piece = heap[0]
            valid = piece.pins == 0 and piece.last == last and -key == piece.next
            if not valid or piece.residence not in (Residence.CLEAN, Residence.DIRTY):
                heapq.heappop(heap)
                continue
            if piece.residence is Residence.DIRTY and not self._writable:
                heapq.heappop(heap)
                continue
            now = self._route.next_use(piece, position)
            if now != piece.next:  # it came into sight, or a tick that named it passed without using it
                heapq.heappop(heap)
                piece.next = now
                self.offer(piece)
                continue
            if piece.next <= beyond:
                return None
            heapq.heappop(heap)
            if piece in needed:
                kept.append(piece)
                continue
            return piece
        return None
