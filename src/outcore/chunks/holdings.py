"""Who holds bytes on the host: chunks, what is borrowed, and pages that wait for their next use.

[Note: Warm pages]
A gradient is written anew in each step and worth nothing after its update. To give its pages back and to take them
again costs more than to fill them: the system finds and clears each page, and below a virtual machine it may have
given them to others meanwhile (measured: 19 ms for 8 MiB that had to come back from there, 0.6 ms for pages at hand,
0.3 ms for pages that never left). So where the budget has room they stay, counted like any others, and are the first
to go when something else needs the room.
"""

from __future__ import annotations

from collections.abc import Iterator

from outcore.chunks.chunk import Chunk, Residence
from outcore.memory.ledger import Ledger


class Holdings:
    """Enters in the ledger what is held, and gives pages back. Changed under the pool's lock alone.

    Attributes:
        used: bytes held in all.
        borrowed: bytes of them that are not a chunk's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._chunks: dict[Chunk, None] = {}
        self._warm: dict[Chunk, None] = {}
        self.used = 0
        self.borrowed = 0

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks on the host, longest there first."""
        return iter(self._chunks)

    @property
    def pinned(self) -> int:
        """Bytes that are in use: pinned chunks, and what is borrowed."""
        return self.borrowed + sum(chunk.nbytes for chunk in self._chunks if chunk.pins)

    @property
    def warm(self) -> int:
        """Bytes of pages that hold nothing."""
        return sum(chunk.nbytes for chunk in self._warm)

    # -- chunks -----------------------------------------------------------------------------------

    def take(self, chunk: Chunk, to: Residence) -> None:
        """A chunk comes to the host; its pages are new, or its own of before, and read as zeros."""
        chunk.move(to)
        self._chunks[chunk] = None
        if chunk in self._warm:
            del self._warm[chunk]
            chunk.region.tensor.zero_()
        else:
            self._hold(chunk, 1)

    def is_warm(self, chunk: Chunk) -> bool:
        """Whether the chunk is empty and has pages still, so that it needs no room."""
        return chunk in self._warm

    def give_back(self, chunk: Chunk, to: Residence) -> None:
        """A chunk leaves the host, and so do its pages."""
        self._leave(chunk, to)
        chunk.region.release()
        self._hold(chunk, -1)

    def empty(self, chunk: Chunk) -> None:
        """A chunk's bytes are worth nothing any more; see [Note: Warm pages]."""
        self._leave(chunk, Residence.EMPTY)
        self._warm[chunk] = None

    def cool(self) -> bool:
        """Give back the pages that hold nothing for the longest; false if there are none."""
        chunk = next(iter(self._warm), None)
        if chunk is None:
            return False
        del self._warm[chunk]
        chunk.region.release()
        self._hold(chunk, -1)
        return True

    def _leave(self, chunk: Chunk, to: Residence) -> None:
        chunk.move(to)
        del self._chunks[chunk]

    def _hold(self, chunk: Chunk, sign: int) -> None:
        self.used += sign * chunk.nbytes
        self._ledger.hold("host", sign * chunk.nbytes, chunk.kind.value)

    # -- other bytes ------------------------------------------------------------------------------

    def borrow(self, nbytes: int) -> None:
        """Bytes that are not a chunk's (less than none: they are repaid)."""
        self.used += nbytes
        self.borrowed += nbytes
        self._ledger.hold("host", nbytes)
