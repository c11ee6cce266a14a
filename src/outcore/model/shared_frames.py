"""Gathered parameters in memory that ranks of a node share.

[Note: One copy on a node]
Where all ranks that keep slices of a unit are on one machine, its frame is the same memory for all of them. Each
writes its own slice there before the word of a gather (see `outcore.parallel.ranks`) and reads those of the others
after it. So nothing crosses a wire, and what is gathered is there once for the node, not for each rank.

A rank that is ahead may take a frame again while another still reads it. It writes its slice, but the bytes that are
there already: values change with a step or a load alone. No rank begins the updates of a step before all have agreed
on its norm, nor a load before all have come to it, when nobody computes with frames any more. So what is read is never
half of one value and half of another.

What is gathered once a step counts in equal parts on all ranks, since all hold it equally long. What is gathered for
each use counts on each rank as a whole: one that is ahead gives it back while others hold it, and nobody else answers
for its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from outcore.chunks.pool import Pool
from outcore.memory.shared import Commons, SharedPlace
from outcore.model.host_frames import HostFrames, frame_bytes
from outcore.model.unit import Unit
from outcore.parallel.node import share
from outcore.parallel.ranks import World


class SharedFrames(HostFrames):
    """See [Note: One copy on a node]. Implements `outcore.model.gathering.Frames`.

    Args:
        commons: a frame for each unit.
        parts: how many ranks answer for a frame's bytes together.
    """

    def __init__(self, units: Sequence[Unit], pool: Pool, world: World, commons: Commons, parts: int) -> None:
        self._commons = commons
        places = iter(_places(units, world.slices.size, commons, parts))
        super().__init__(units, pool, world, lambda nbytes: next(places))

    def gather(self, unit: Unit, what: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)  # each wrote its slice before the word
        return done

    def _fill(self, unit: Unit) -> None:
        self._commons.enter(unit.index)
        super()._fill(unit)

    def _let_go(self, unit: Unit) -> None:
        self._commons.leave(unit.index)


def shared_frames(units: Sequence[Unit], pool: Pool, world: World, lasting: bool) -> SharedFrames:
    """Frames that the ranks of this node share. All ranks call this together, and can.

    Args:
        lasting: gathered once a step, not for each use.

    Raises:
        TierError: the system refused.
    """
    size = world.slices.size
    sizes = [sum(frame_bytes(store, size) for store in unit.stores) for unit in units]
    memory = share(world, Commons.size(sizes, size))
    commons = Commons(memory, sizes, world.slices.number, size)
    return SharedFrames(units, pool, world, commons, size if lasting else 1)


def _places(units: Sequence[Unit], ranks: int, commons: Commons, parts: int) -> list[SharedPlace]:
    """A place for each run, in order."""
    found = []
    for number, unit in enumerate(units):
        assert unit.index == number
        offset = 0
        for store in unit.stores:
            nbytes = frame_bytes(store, ranks)
            found.append(commons.place(number, offset, nbytes, parts))
            offset += nbytes
    return found
