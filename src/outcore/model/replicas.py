"""Frozen parameters that every rank has whole, in memory that the ranks of a node share.

[Note: Frozen replicas]
With ``Sharding("none")`` nothing is gathered, so ranks may read parameters whenever they like. What is frozen never
changes after the first values: its runs lie in one shared memory for all ranks of a node. Each writes its slice there,
and the word that ends the first values is what the others wait for. Trained parameters change on each rank at its own
time, and with a disk each rank decides for itself what leaves: then each has a copy.
"""

from __future__ import annotations

from outcore.chunks.layout import Run
from outcore.chunks.store import RunStore, Span, span_bytes
from outcore.memory.shared import Commons, SharedPlace
from outcore.parallel.node import share
from outcore.parallel.ranks import World


class Replicas:
    """The frozen runs of the ranks of a node; see [Note: Frozen replicas]."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: list[tuple[SharedPlace, int]] = []
        self._runs: list[tuple[SharedPlace, int]] = []
        self._end = 0
        self._commons: Commons | None = None

    def span(self, run: Run) -> Span:
        """Places for the parameter chunks of a run, which have no memory before `settle`."""
        start, ranks = self._end, self._world.slices.size
        self._end += span_bytes(run)
        self._runs.append((SharedPlace(span_bytes(run), ranks), start))

        def part(offset: int, nbytes: int) -> SharedPlace:
            found = SharedPlace(nbytes, ranks)
            self._parts.append((found, start + offset))
            return found

        return part

    def last(self, store: RunStore) -> SharedPlace:
        """The whole of the run that a span was last asked for, which became this store."""
        size, number = self._world.slices.size, self._world.slices.number
        piece = store.run.share(size)
        store.written = range(number * piece, (number + 1) * piece)
        return self._runs[-1][0]

    def settle(self) -> None:
        """Bring the memory. All ranks call this together; they have the same runs.

        Raises:
            TierError: the system refused.
        """
        if self._end:
            ranks = self._world.slices
            memory = share(self._world, Commons.size([self._end], ranks.size))
            self._commons = Commons(memory, [self._end], ranks.number, ranks.size)
            self._commons.enter(0)
            for place, offset in (*self._runs, *self._parts):
                self._commons.lie(place, 0, offset)

    def shut(self) -> None:
        """Nobody reads them here any more."""
        commons, self._commons = self._commons, None
        if commons is not None:
            commons.leave(0)
