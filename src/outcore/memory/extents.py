"""Which bytes of a file belong to whom."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from outcore.memory.blockfile import BLOCK
from outcore.memory.ledger import OTHER


@dataclass(eq=False, slots=True)
class Extent:
    """A place on disk for ``nbytes`` bytes. Belongs to who allocated it until it is freed.

    The digests live here, in host memory, so that a block which is stale, flipped or swapped with
    another can't bring a matching digest along.

    Attributes:
        nbytes: bytes it holds, as asked for.
        offset: where it starts in its file; a multiple of `BLOCK`.
        lane: which file.
        label: what it holds, for messages and reports.
        kind: the same, as the ledger calls it.
    """

    nbytes: int
    offset: int
    lane: int
    label: str = field(default="", repr=False)
    kind: str = field(default=OTHER, repr=False)
    _digests: list[int] | None = field(default=None, repr=False)
    _readers: int = field(default=0, repr=False)
    _writing: bool = field(default=False, repr=False)
    _freed: bool = field(default=False, repr=False)

    @property
    def space(self) -> int:
        """Bytes it takes on disk: whole blocks."""
        return blocks(self.nbytes)


def blocks(nbytes: int) -> int:
    """Round up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


class Space:
    """The free ranges of a file. Not thread-safe. All sizes are whole blocks.

    A hole of exactly the right size is taken first, because chunks come in few sizes and holes then never
    splinter; else the lowest hole that is large enough, so that the file grows only when it must.
    Holes that touch become one.

    Args:
        capacity: bytes the file may grow to.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // BLOCK * BLOCK
        self.used = 0
        self._starts: list[int] = [0] if self.capacity else []
        self._sizes: list[int] = [self.capacity] if self.capacity else []

    @property
    def largest(self) -> int:
        """Bytes of the largest hole."""
        return max(self._sizes, default=0)

    def take(self, nbytes: int) -> int | None:
        """The offset of a range that is now taken, or ``None`` if no hole is large enough."""
        found = None
        for index, size in enumerate(self._sizes):
            if size == nbytes:
                found = index
                break
            if size > nbytes and found is None:
                found = index
        if found is None:
            return None
        start = self._starts[found]
        if self._sizes[found] == nbytes:
            del self._starts[found], self._sizes[found]
        else:
            self._starts[found] += nbytes
            self._sizes[found] -= nbytes
        self.used += nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Return a range."""
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._sizes.insert(at, nbytes)
        self.used -= nbytes
        self._join(at)
        if at > 0:
            self._join(at - 1)

    def _join(self, at: int) -> None:
        """Make hole ``at`` and the next one hole if they touch."""
        following = at + 1
        if following < len(self._starts) and self._starts[at] + self._sizes[at] == self._starts[following]:
            self._sizes[at] += self._sizes[following]
            del self._starts[following], self._sizes[following]
