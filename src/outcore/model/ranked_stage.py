"""Computing on the CPU as one of several ranks: parameters are gathered for use, gradients summed over ranks.

[Note: When gradients are summed]
All ranks must sum the same units at the same time, but which gradients they have may differ. So with each gather
every rank says which units' gradients are complete with it, as far as it can know: those that are closed. What is
complete on all is summed before the gather, the rest when backward is over. So the gradients of few units exist
whole at a time. Where gradients may stay whole, all of it waits for the end of backward, which needs fewer words; and
where ranks sum their own over the passes of a step first, for the step.

[Note: Frames]
A unit's parameters are gathered into a frame: a range of addresses for each run, in which this rank's slice has its
place. Pages come with a gather and go when the unit closes, or, where parameters are gathered once a step, when
the step's updates make them stale. The slice itself lies in chunks, as the whole of it does where there is one rank.

[Note: Ahead]
While one unit computes the next one is gathered, by a thread and over connections of their own. Each rank says, with
the header of a gather, which unit it expects next and has a slice and room for; if all say the same it comes, else
it comes when it is asked for. So ranks whose disks or updates are behind delay each other no more than without it, and
memory is never taken from what is needed sooner. A unit that came and is not used next leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch

from outcore.chunks.pool import Access, Pool
from outcore.chunks.store import RunStore, pages
from outcore.errors import PeerError
from outcore.memory.host import Region, reserve
from outcore.memory.ledger import WIRE, Ledger
from outcore.model.stage import HostStage, view
from outcore.model.unit import Binding, Unit
from outcore.optim.gradients import Gradients
from outcore.optim.reduction import Reduction
from outcore.optim.updates import Updates
from outcore.parallel.courier import Courier
from outcore.parallel.header import BITS
from outcore.parallel.ranks import World
from outcore.trace.clock import Clock
from outcore.trace.meter import uncounted

NEXT = 64
"""Ticks among which the next use is looked for: there are updates between them."""

WORD = 4
"""Bytes of a header that say which unit could be gathered next."""

FLAGS = (BITS - WORD) * 8
"""Units of which the rest of a header says whether they are complete; others wait for the end of backward."""


class RankedStage(HostStage):
    """Every rank keeps everything; gradients are summed over ranks. Implements `outcore.model.stage.Stage`.

    Args:
        units: all units, in the order of their numbers.
        own: takes what this rank's backward passes leave.
        stores: from the runs as they are kept to those in ``own``.
        reduction: sums gradients over ranks.
        eager: sum them as they are complete, not all at once.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pool: Pool,
        spans: dict[RunStore, Region],
        own: Gradients,
        stores: Mapping[RunStore, RunStore],
        reduction: Reduction,
        world: World,
        eager: bool,
    ) -> None:
        super().__init__(pool, spans, own)
        self._units = units
        self._stores = stores
        self._slots = {(store, slot.index): slot for store in stores.values() for slot in store.run.slots}
        self._reduction = reduction
        self._world = world
        self._eager = eager

    # -- gradients --------------------------------------------------------------------------------

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        store = self._stores[binding.store]
        self._gradients.add(store, self._slots[store, binding.slot.index], gradient.contiguous())

    def gradients_complete(self, unit: Unit) -> None:
        pass

    def backward_over(self) -> None:
        if self._world.sharding.sums == "backward":
            self._reduce_all("the end of a backward pass")

    def settle_gradients(self) -> None:
        if self._world.sharding.sums == "step":
            self._reduce_all("the sum of the step's gradients")

    def collected(self) -> set[int]:
        return self._gradients.collected

    def forget_gradients(self) -> None:
        self._gradients.clear()

    def _reduce_all(self, what: str) -> None:
        with self._world.telling(what):
            self._reduction.prepare()
            try:
                self._world.agree(what)
            except BaseException:
                self._reduction.cancel()
                raise
            stores = [store for unit in reversed(self._units) for store in unit.stores]
            with uncounted():
                self._reduction.reduce(stores, what)

    def _complete(self) -> bytes:
        """A bit for each unit that is closed and has gradients that wait."""
        bits = bytearray(-(-len(self._units) // 8))
        if self._eager:
            for unit in self._units[:FLAGS]:
                if unit.opened == 0 and self._reduction.has(unit.stores):
                    bits[unit.index // 8] |= 1 << unit.index % 8
        return bytes(bits[: FLAGS // 8])

    def _agree(self, what: str, word: int) -> bool:
        """Wait for all ranks to come to the same use, and sum what is complete on all of them.

        Returns:
            Whether all ranks have the same word.
        """
        complete = self._complete()
        waiting = any(complete)
        if waiting:
            self._reduction.prepare()
        try:
            said = self._world.agree(what, word.to_bytes(WORD, "little") + complete)
        except BaseException:
            if waiting:
                self._reduction.cancel()
            raise
        agreed = [
            unit
            for unit in reversed(self._units[:FLAGS])
            if all(bits[WORD + unit.index // 8] >> unit.index % 8 & 1 for bits in said)
        ]
        if agreed:
            with uncounted():
                self._reduction.reduce([store for unit in agreed for store in unit.stores], what)
            self._world.agree(what)  # what went wrong with the sums is heard of here
        elif waiting:
            self._reduction.cancel()
        return all(bits[:WORD] == said[0][:WORD] for bits in said)


@dataclass(frozen=True)
class Coming:
    """A unit that is being gathered before it is asked for."""

    unit: Unit
    arrival: Future[None]


class ShardedStage(RankedStage):
    """Every rank keeps its slice, and parameters are gathered for use; see [Note: Frames] and [Note: Ahead].

    Args:
        keeps: gather parameters once a step, not for each use.
        updates: what is due has no values to gather yet.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pool: Pool,
        own: Gradients,
        stores: Mapping[RunStore, RunStore],
        reduction: Reduction,
        world: World,
        eager: bool,
        keeps: bool,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> None:
        super().__init__(units, pool, {}, own, stores, reduction, world, eager)
        self._keeps = keeps
        self._clock = clock
        self._ledger = ledger
        self._updates = updates
        self._size = world.slices.size
        self._frames = {
            store: reserve(frame_bytes(store, self._size)) for unit in units for store in unit.stores
        }
        self._here: set[Unit] = set()
        self._courier = Courier()
        self._coming: Coming | None = None

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return [view(self._flat(b.store), b, b.store.run.first) for b in unit.bindings]

    def open(self, unit: Unit) -> None:
        what = f"the gather of {unit.name or 'the model'}"
        if self._coming is not None and self._coming.unit is not unit:
            self._give_back(self._coming.unit)  # another unit was expected, by all ranks
        coming, self._coming = self._coming, None
        absent = unit not in self._here
        if absent:
            self._pool.borrow(self._bytes(unit))
            self._take(unit)
        try:
            if absent or coming is not None or self._eager:
                following = self._propose(unit)
                agreed = self._agree(what, 0 if following is None else following.index + 1)
                if following is not None and not agreed:
                    self._give_back(following)
                    following = None
                if absent:
                    coming = self._gather(unit, what)
                if following is not None:
                    self._coming = self._gather(following, f"the gather of {following.name} ahead of its use")
            if coming is not None:
                self._await(coming)
        except BaseException:
            if absent:
                self._give_back(unit)
            raise

    def close(self, unit: Unit) -> None:
        if not self._keeps:
            self._give_back(unit)

    def stale(self, unit: Unit) -> None:
        if unit in self._here and any(store.run.trained for store in unit.stores):
            self._give_back(unit)

    def replaced(self, unit: Unit) -> None:
        if unit in self._here:
            self._give_back(unit)

    def shut(self) -> None:
        for unit in tuple(self._here):
            with suppress(PeerError):
                self._give_back(unit)
        self._courier.close()
        super().shut()

    # -- gathers ------------------------------------------------------------------------------------

    def _gather(self, unit: Unit, what: str) -> Coming:
        gathers, flats = self._world.gathers, [self._flat(store) for store in unit.stores]

        def errand() -> None:
            for flat in flats:
                gathers.gather(flat, what)

        return Coming(unit, self._courier.send(errand))

    def _await(self, coming: Coming) -> None:
        if coming.arrival.done():
            coming.arrival.result()
            return
        with self._ledger.waiting(WIRE):
            coming.arrival.result()

    def _propose(self, unit: Unit) -> Unit | None:
        """The unit that is used next, if its slice is at hand and there is room: it is taken then."""
        following, distance = self._next_use(unit)
        if following is None or following in self._here or self._updates.is_due(following.stores):
            return None
        if not all(chunk.ready for chunk in following.parameter_chunks):
            return None
        if not self._pool.borrow_ahead(self._bytes(following), distance):
            return None
        self._take(following)
        return following

    def _next_use(self, unit: Unit) -> tuple[Unit | None, int]:
        """The unit that is used next, and ticks until then; none if a step may come first.

        Between the units of a forward lie the updates of the step before. Behind a backward lie those of its own.
        """
        assert isinstance(self._clock.now, tuple)
        within = self._clock.now[0] == "forward"
        for distance, key in self._clock.upcoming(NEXT):
            assert isinstance(key, tuple)
            if key[0] in ("forward", "backward"):
                found = self._units[key[1]]
                return (None if found is unit else found), distance
            if key[0] != "update" or not within:
                break
        return None, 0

    def _take(self, unit: Unit) -> None:
        """Bring this rank's slice to its place in the frame, for which there is room."""
        self._here.add(unit)
        try:
            for store in unit.stores:
                flat = self._flat(store)
                for k in range(store.run.chunks):
                    start, stop = (edge + store.run.first for edge in store.run.extent(k))
                    with self._pool.guard([store.parameters[k]], Access.READ):
                        flat[start:stop].copy_(store.parameter(k))
        except BaseException:
            self._give_back(unit)
            raise

    def _give_back(self, unit: Unit) -> None:
        coming = self._coming
        try:
            if coming is not None and coming.unit is unit:
                self._coming = None
                self._await(coming)
        finally:
            self._here.discard(unit)
            for store in unit.stores:
                self._frames[store].release()
            self._pool.repay(self._bytes(unit))

    def _bytes(self, unit: Unit) -> int:
        return sum(self._frames[store].nbytes for store in unit.stores)

    def _flat(self, store: RunStore) -> torch.Tensor:
        run = store.run
        count = self._size * run.entire.share(self._size)
        return self._frames[store].tensor[: count * run.dtype.itemsize].view(run.dtype)


def frame_bytes(store: RunStore, ranks: int) -> int:
    """Bytes of a run's frame, in whole pages: equal slices for all ranks."""
    run = store.run.entire
    return pages(ranks * run.share(ranks) * run.dtype.itemsize)
