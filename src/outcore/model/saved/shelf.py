"""Chunks for saved tensors, the same ones in each lap.

The schedule foresees chunks, not names: what a block saves as its k-th tensor must lie in the same chunk whenever
it has the same size. Chunks that are not in use cost addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable

from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.store import pages
from outcore.memory.place import Place

Slot = tuple[int, int]
"""The number of a unit, and the how-manieth tensor of its call."""

IDLE = 2
"""Chunks of one slot that are kept while nothing is in them: inputs come in more than one size."""


class Shelf:
    """Hands chunks out and takes them back empty.

    Args:
        place: makes a place of so many bytes.
    """

    def __init__(self, place: Callable[[int], Place]) -> None:
        self._place = place
        self._idle: dict[Slot, list[Chunk]] = {}

    def take(self, slot: Slot, name: str, nbytes: int) -> Chunk:
        """An empty chunk that holds ``nbytes``; the one that the slot had last, if it fits."""
        wanted = pages(nbytes)
        idle = self._idle.get(slot, [])
        for k, chunk in enumerate(idle):
            if chunk.nbytes == wanted:
                return idle.pop(k)
        return Chunk(Kind.ACTIVATION, name, self._place(wanted))

    def put(self, slot: Slot, chunk: Chunk) -> None:
        """A chunk that is empty again."""
        idle = self._idle.setdefault(slot, [])
        idle.append(chunk)
        del idle[:-IDLE]
