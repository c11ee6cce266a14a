"""Who holds bytes on the host: chunks, what is borrowed, and pages that wait for their next use.

[Note: Warm pages]
A gradient is written anew in each step and worth nothing after its update. To give its pages back and to take them
again costs more than to fill them: the system finds and clears each page, and below a virtual machine it may have
given them to others meanwhile (measured: 19 ms for 8 MiB that had to come back from there, 0.6 ms for pages at hand,
0.3 ms for pages that never left). So where the budget has room they stay, counted like any others, and are the first
to go when something else needs the room.

So are the pages of a chunk that had to leave: they stay until the room is made that it left for. A chunk of the same
size that comes in takes them over, if both lie in frames (the note in `outcore.memory.frames`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from outcore.chunks.chunk import Chunk, Residence
from outcore.memory.frames import Framed
from outcore.memory.ledger import Ledger


class Holdings:
    """Enters in the ledger what is held, and gives pages back. Changed under the pool's lock alone.

    Args:
        came: told of each chunk that came to the host.
        left: told of each that left it.

    Attributes:
        used: bytes held in all.
        borrowed: bytes of them that are not a chunk's.
        warm: bytes of pages that hold nothing.
        below: chunks whose bytes are on disk alone.
    """

    def __init__(self, ledger: Ledger, came: Callable[[Chunk], None], left: Callable[[Chunk], None]) -> None:
        self._ledger = ledger
        self._came, self._left = came, left
        self._chunks: dict[Chunk, None] = {}
        self._warm: dict[Chunk, None] = {}
        self._framed: defaultdict[int, dict[Chunk, None]] = defaultdict(
            dict
        )  # those that others can take, by size
        self.used = self.borrowed = self.warm = 0
        self.below = 0

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks on the host, longest there first."""
        return iter(self._chunks)

    @property
    def pinned(self) -> int:
        """Bytes that are in use: pinned chunks, and what is borrowed."""
        return self.borrowed + sum(chunk.nbytes for chunk in self._chunks if chunk.pins)

    # -- chunks -----------------------------------------------------------------------------------

    def take(self, chunk: Chunk, to: Residence) -> None:
        """A chunk comes to the host. Unless it is to be read from disk, its bytes read as zeros."""
        self.below -= chunk.residence is Residence.DISK
        chunk.move(to)
        self._chunks[chunk] = None
        self._came(chunk)
        donor = self._donors((chunk,))[0]
        if donor is None:
            self._hold(chunk, 1)
            return
        self._chill(donor)
        if isinstance(chunk.region, Framed) and isinstance(donor.region, Framed) and donor is not chunk:
            chunk.region.take_over(donor.region)
        self._hold(donor, -1)
        self._hold(chunk, 1)
        if to is not Residence.READING:
            chunk.region.tensor.zero_()

    def missing(self, chunks: Sequence[Chunk]) -> int:
        """The most bytes these chunks take beside what is held, as they come in this order; may be below 0."""
        more = (
            chunk.nbytes - (0 if donor is None else donor.nbytes)
            for chunk, donor in zip(chunks, self._donors(chunks), strict=True)
        )
        return max(accumulate(more), default=0)

    def give_back(self, chunk: Chunk, to: Residence) -> None:
        """A chunk leaves the host, and so do its pages."""
        self._leave(chunk, to)
        chunk.region.release()
        self._hold(chunk, -1)

    def empty(self, chunk: Chunk) -> None:
        """A chunk's bytes are worth nothing any more; see [Note: Warm pages]."""
        self._leave(chunk, Residence.EMPTY)
        self._keep_warm(chunk)

    def forget(self, chunk: Chunk) -> None:
        """The bytes that a chunk has on disk are worth nothing any more."""
        chunk.move(Residence.EMPTY)
        self.below -= 1

    def vacate(self, chunk: Chunk) -> None:
        """A chunk whose bytes are on disk leaves for others, which may take over its pages."""
        if _frame_bytes(chunk):
            self._leave(chunk, Residence.DISK)
            self._keep_warm(chunk)
        else:
            self.give_back(chunk, Residence.DISK)

    def cool(self, chunks: Sequence[Chunk] = ()) -> bool:
        """Give back the oldest pages that hold nothing and that these chunks don't need; false if there are none."""
        donors = self._donors(chunks)
        chunk = next((chunk for chunk in self._warm if chunk not in donors), None)
        if chunk is None:
            return False
        self._chill(chunk)
        chunk.region.release()
        self._hold(chunk, -1)
        return True

    def _donors(self, chunks: Sequence[Chunk]) -> list[Chunk | None]:
        """Whose warm pages each of these chunks has if they come in this order: its own, another's, or nobody's."""
        donors: list[Chunk | None] = []
        for chunk in chunks:
            if chunk in self._warm and chunk not in donors:
                donors.append(chunk)
                continue
            size = _frame_bytes(chunk)
            others = self._framed[size] if size else ()
            donors.append(next((other for other in others if other not in donors), None))
        return donors

    def _keep_warm(self, chunk: Chunk) -> None:
        self._warm[chunk] = None
        self.warm += chunk.nbytes
        if size := _frame_bytes(chunk):
            self._framed[size][chunk] = None

    def _chill(self, chunk: Chunk) -> None:
        del self._warm[chunk]
        self.warm -= chunk.nbytes
        if size := _frame_bytes(chunk):
            del self._framed[size][chunk]

    def _leave(self, chunk: Chunk, to: Residence) -> None:
        chunk.move(to)
        self.below += to is Residence.DISK
        del self._chunks[chunk]
        self._left(chunk)

    def _hold(self, chunk: Chunk, sign: int) -> None:
        self.used += sign * chunk.nbytes
        self._ledger.hold("host", sign * chunk.nbytes, chunk.kind.value)

    # -- other bytes ------------------------------------------------------------------------------

    def borrow(self, nbytes: int) -> None:
        """Bytes that are not a chunk's (less than none: they are repaid)."""
        self.used += nbytes
        self.borrowed += nbytes
        self._ledger.hold("host", nbytes)


def _frame_bytes(chunk: Chunk) -> int:
    """The size of the chunk's frame; 0 if it has an address of its own."""
    return chunk.region.frame_bytes if isinstance(chunk.region, Framed) else 0
