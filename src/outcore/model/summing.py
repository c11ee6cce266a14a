"""Gradients of a model's units summed over ranks: when, and what each rank knows of it beforehand.

[Note: When gradients are summed]
All ranks must sum the same units at the same time, but which gradients they have may differ. So with each gather
every rank says which units' gradients are complete with it, as far as it can know: those that are closed. What is
complete on all is summed before the gather, the rest when backward is over. So the gradients of few units exist
whole at a time. Where gradients may stay whole, all of it waits for the end of backward, which needs fewer words; and
where ranks sum their own over the passes of a step first, for the step.

What a rank says depends on what it did, never on which copies have arrived: otherwise the order of sums, and with it
the last bits, would depend on timing. Gradients that come down from a device are waited for. So that there is little
to wait for, a unit there is complete one gather later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from outcore.chunks.store import RunStore
from outcore.model.unit import Binding, Unit
from outcore.optim.gradients import Gradients
from outcore.optim.reduction import Reduction
from outcore.parallel.header import BITS
from outcore.parallel.ranks import World
from outcore.trace.meter import uncounted

WORD = 4
"""Bytes of a header that say which unit could be gathered next."""

FLAGS = (BITS - WORD) * 8
"""Units of which the rest of a header says whether they are complete; others wait for the end of backward."""


class Arrivals(Protocol):
    """Gradients on their way to the host."""

    def ripe(self, closed: Sequence[Unit]) -> Sequence[Unit]:
        """Of the units that are closed, those whose gradients can be summed now."""

    def arrive(self, stores: Collection[RunStore]) -> None:
        """Wait for those of these runs."""


class Here:
    """Backward leaves them on the host. Implements `Arrivals`."""

    def ripe(self, closed: Sequence[Unit]) -> Sequence[Unit]:
        return closed

    def arrive(self, stores: Collection[RunStore]) -> None:
        pass


class Summing:
    """Says what is complete, and sums it; see [Note: When gradients are summed].

    Args:
        units: all units, in the order of their numbers.
        own: takes what this rank's backward passes leave.
        stores: from the trained runs as they are kept to those in ``own``.
        reduction: sums gradients over ranks.
        arrivals: what is on its way to ``own``.
        eager: sum what is complete with each gather, not all at once.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        own: Gradients,
        stores: Mapping[RunStore, RunStore],
        reduction: Reduction,
        world: World,
        arrivals: Arrivals,
        eager: bool,
    ) -> None:
        self._units = units
        self._own = own
        self._stores = stores
        self._reduction = reduction
        self._world = world
        self._arrivals = arrivals
        self.eager = eager
        slots = {(store, slot.index): slot for store in stores.values() for slot in store.run.slots}
        self._homes = {
            b: Binding(b.name, b.parameter, stores[b.store], slots[stores[b.store], b.slot.index])
            for unit in units
            for b in unit.bindings
            if b.store in stores
        }

    # -- what one rank has --------------------------------------------------------------------------

    def home(self, binding: Binding) -> Binding:
        """Where this rank's own gradient of a trained parameter goes."""
        return self._homes[binding]

    def runs(self, unit: Unit) -> list[RunStore]:
        """The runs that this rank's own gradients of a unit lie in."""
        return [self._stores[store] for store in unit.stores if store in self._stores]

    def collected(self) -> set[int]:
        """Numbers of the parameters whose gradients wait here."""
        return self._own.collected

    def forget(self) -> None:
        """Drop what waits."""
        self._own.clear()

    # -- together -----------------------------------------------------------------------------------

    def pass_over(self) -> None:
        """A backward pass has ended."""
        if self._world.sharding.sums == "backward":
            self._sum_all("the end of a backward pass")

    def settle(self) -> None:
        """Sum all that waits: the step needs it."""
        if self._world.sharding.sums == "step":
            self._sum_all("the sum of the step's gradients")

    def _sum_all(self, what: str) -> None:
        with self._world.telling(what):
            self._arrivals.arrive(self._stores.values())
            self._reduction.prepare()
            self._world.agree(what)
            stores = [store for unit in reversed(self._units) for store in unit.stores]
            with uncounted():
                self._reduction.reduce(stores, what)
            self._world.agree(what)  # all have what they were sent
            self._reduction.rest()

    def agree(self, what: str, word: int) -> bool:
        """Wait for all ranks to come to the same use, and sum what is complete on all of them.

        Returns:
            Whether all ranks have the same word.
        """
        complete = self._complete()
        if any(complete):
            self._reduction.prepare()
        said = self._world.agree(what, word.to_bytes(WORD, "little") + complete)
        agreed = [
            unit
            for unit in reversed(self._units[:FLAGS])
            if all(bits[WORD + unit.index // 8] >> unit.index % 8 & 1 for bits in said)
        ]
        if agreed:
            with uncounted():
                self._reduction.reduce([store for unit in agreed for store in unit.stores], what)
            self._world.agree(what)  # what went wrong with the sums is heard of here
        return all(bits[:WORD] == said[0][:WORD] for bits in said)

    def _complete(self) -> bytes:
        """A bit for each unit that is closed and has gradients that wait. They are on the host afterwards.

        What may fail here alone, such as the disk that an older gradient has to leave for, so fails before the word.
        """
        bits = bytearray(-(-len(self._units) // 8))
        if self.eager:
            ripe = self._arrivals.ripe([unit for unit in self._units[:FLAGS] if unit.opened == 0])
            self._arrivals.arrive([store for unit in ripe for store in self.runs(unit)])
            for unit in ripe:
                if self._reduction.has([store for store in unit.stores if store in self._stores]):
                    bits[unit.index // 8] |= 1 << unit.index % 8
        return bytes(bits[: FLAGS // 8])
