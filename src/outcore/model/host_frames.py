"""Gathered parameters on the host.

[Note: Frames]
A unit's parameters are gathered into a frame: room for each whole run, in which this rank's slice has its place. On
a CPU it is a range of addresses that never change; on the way to a device it is page-locked memory. Pages
come with a gather and go when the unit closes, or, where parameters are gathered once a step, when the step's updates
make them stale. The slice itself lies in chunks, as the whole of it does where there is one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from outcore.chunks.pool import Access, Pool
from outcore.chunks.store import Reserve, RunStore, pages
from outcore.model.unit import Unit
from outcore.parallel.courier import Courier
from outcore.parallel.ranks import World


class HostFrames:
    """Frames within the host budget; see [Note: Frames]. Implements `outcore.model.gathering.Frames`.

    Args:
        reserve: makes the memory of a run's frame.
    """

    def __init__(self, units: Sequence[Unit], pool: Pool, world: World, reserve: Reserve) -> None:
        self._pool = pool
        self._world = world
        self._size = world.slices.size
        self._places = {
            store: reserve(frame_bytes(store, self._size)) for unit in units for store in unit.stores
        }
        self._held: set[Unit] = set()
        self._leaving: set[Unit] = set()
        self._lent: Counter[Unit] = Counter()
        self._courier = Courier()

    def take(self, unit: Unit) -> None:
        self._pool.borrow(self._bytes(unit))
        self._fill(unit)

    def take_ahead(self, unit: Unit, distance: int) -> bool:
        if unit in self._held or not self._pool.borrow_ahead(self._bytes(unit), distance):
            return False  # held: it was given back, and a copy out of it is still under way
        self._fill(unit)
        return True

    def gather(self, unit: Unit, what: str) -> Future[None]:
        gathers, flats = self._world.gathers, [self._whole(store) for store in unit.stores]

        def errand() -> None:
            for flat in flats:
                gathers.gather(flat, what)

        return self._courier.send(errand)

    def give_back(self, unit: Unit) -> None:
        if unit in self._held:
            self._leaving.add(unit)
            self._release(unit)

    def may_stay(self, unit: Unit) -> bool:
        return self._pool.has_spare(self._bytes(unit))

    def shut(self) -> None:
        self._courier.close()

    def flat(self, store: RunStore) -> torch.Tensor:
        """A run's values, shape [elements of the whole run]; valid while its unit is gathered."""
        return self._whole(store)[: store.run.entire.numel]

    def lend(self, unit: Unit) -> Loan:
        """Keep a frame where it is until the loan is closed, also if it is given back meanwhile."""
        self._lent[unit] += 1
        return Loan(self, unit)

    def returned(self, unit: Unit) -> None:
        """A loan is over."""
        self._lent[unit] -= 1
        if unit in self._leaving:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        if self._lent[unit] == 0:
            self._held.discard(unit)
            self._leaving.discard(unit)
            self._let_go(unit)
            self._pool.repay(self._bytes(unit))

    def _let_go(self, unit: Unit) -> None:
        """Give the frame's pages back."""
        for store in unit.stores:
            self._places[store].release()

    def _fill(self, unit: Unit) -> None:
        """Bring this rank's slice to its place in the frame, for which there is room."""
        assert unit not in self._held, unit.name
        self._held.add(unit)
        try:
            for store in unit.stores:
                flat = self._whole(store)
                for k in range(store.run.chunks):
                    start, stop = (edge + store.run.first for edge in store.run.extent(k))
                    with self._pool.guard([store.parameters[k]], Access.READ):
                        flat[start:stop].copy_(store.parameter(k))
        except BaseException:
            self.give_back(unit)
            raise

    def _bytes(self, unit: Unit) -> int:
        return sum(self._places[store].nbytes for store in unit.stores)

    def _whole(self, store: RunStore) -> torch.Tensor:
        """Equal slices for all ranks; the last of them may lie beyond the end of the run."""
        run = store.run
        count = self._size * run.entire.share(self._size)
        return self._places[store].tensor[: count * run.dtype.itemsize].view(run.dtype)


class Loan:
    """A copy out of a frame is under way."""

    def __init__(self, frames: HostFrames, unit: Unit) -> None:
        self._frames = frames
        self._unit = unit

    def close(self) -> None:
        """It is over."""
        self._frames.returned(self._unit)


def frame_bytes(store: RunStore, ranks: int) -> int:
    """Bytes of a run's frame, in whole pages: equal slices for all ranks."""
    run = store.run.entire
    return pages(ranks * run.share(ranks) * run.dtype.itemsize)
