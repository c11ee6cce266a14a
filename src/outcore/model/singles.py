"""Parameters of one element: their values can be read, and written, between steps.

[Note: Singles]
A temperature, the scale of CLIP's logits, a gate: loops log such values (``model.scale.item()``) and bound them
(``model.scale.data.clamp_(max=4.6)``). What stands for a larger parameter is one element expanded to its shape, which
torch refuses to write to; for these it would take the write, and nobody would know of it.

So the element that stands for a single is owned by `Singles` (and counted with what stands for the others). When the
parameter is looked at, the value is brought as the steps so far leave it: its chunk alone is read, after its update.
From then on it is compared with what was brought, before the unit is used, a step, a save, a load and wherever else
values are read. Other bits are a write: they become the value, and that of the master, as by `outcore.change`.

In bf16 what is shown, and written, is the parameter as it computes. A master is replaced only by a write that changes
that; to bound the master itself there is `outcore.change`.

An alias that was taken before the values changed (``data`` kept over a step) shows old ones, and a write to it can't
be told from one that knows the new ones: it is refused.

Where each of several ranks has a part of the parameters only all of them together can bring one: looking is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.chunks.pool import Access, Pool
from outcore.errors import StateError
from outcore.memory.refusal import allocating
from outcore.model.closed import stand
from outcore.model.stage import Stage
from outcore.model.unit import Binding, Unit
from outcore.model.weights import write
from outcore.model.writes import lost
from outcore.optim.kernels import Rule
from outcore.optim.updates import Updates
from outcore.trace.meter import uncounted


@dataclass(eq=False)
class _Shown:
    """What was brought last.

    Attributes:
        bits: the element's bytes.
        version: of the unit when it was brought.
    """

    bits: bytes
    version: int


class Singles:
    """See [Note: Singles].

    Args:
        alone: whether all values are here. Otherwise looking at one is refused.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stage: Stage,
        updates: Updates,
        pool: Pool,
        rule: Rule | None,
        alone: bool,
    ) -> None:
        self._units = units
        self._stage = stage
        self._updates = updates
        self._pool = pool
        self._put = None if rule is None else rule.set_master
        self._alone = alone
        self._shown: dict[Unit, dict[Binding, _Shown]] = {}

    def stand(self) -> list[Callable[[], None]]:
        """All units are closed: from now on what is done with their parameters is known. Undone by what is returned."""
        undo = []
        for unit in self._units:
            for binding in unit.bindings:
                told = (self.look, unit, binding) if binding.slot.numel == 1 else ()
                undo.append(stand(binding.parameter, binding.name, *told))
        return [*undo, self._forget]

    def has(self, binding: Binding) -> bool:
        """Whether its value may be looked at, so that what stands for it is no NaN."""
        return self._alone and binding.slot.numel == 1

    @allocating("the value of a parameter of one element")
    def look(self, unit: Unit, binding: Binding) -> None:
        """A closed parameter is about to be looked at: what stands for it has its value afterwards.

        Raises:
            StateError: each of several ranks has a part of the parameters; or what is shown was written to too late.
        """
        if not self._alone:
            raise StateError(
                f"{binding.name} can't be read or written outside of a forward by one of several ranks: read it by "
                "outcore.weights(model) or outcore.gather(model), and change it by outcore.change(model, function), "
                "on all of them"
            )
        self.take(unit)
        known = self._shown.setdefault(unit, {})
        if binding in known and known[binding].version == unit.version:
            return
        with torch.inference_mode(False), torch.no_grad(), uncounted():
            self._updates.settle(unit.stores)
            binding.resting.copy_(self._read(binding))
            known[binding] = _Shown(_bits(binding), unit.version)

    def _read(self, binding: Binding) -> torch.Tensor:
        store, slot = binding.store, binding.slot
        (k,) = store.run.covering(slot)
        at = next(segment.start for segment in store.run.segments(k) if segment.slot is slot)
        with self._pool.guard((store.parameters[k],), Access.READ):
            return store.parameter(k)[at].clone().view(slot.shape)

    def take_all(self) -> None:
        """Take what was written to any of them."""
        for unit in tuple(self._shown):
            if not unit.opened:
                self.take(unit)

    def take(self, unit: Unit) -> None:
        """What was written to those of a unit is their value from now on; none of its parameters shows its values.

        Raises:
            StateError: it was written after the value had become another; that stays.
        """
        known = self._shown.get(unit)
        if not known:
            return
        with torch.inference_mode(False), torch.no_grad(), uncounted():
            now = {binding: _bits(binding) for binding in known}
            written = {binding: bits for binding, bits in now.items() if bits != known[binding].bits}
            if not written:
                return
            for binding in written:
                if known[binding].version != unit.version:
                    del known[binding]  # brought anew when it is looked at
                    raise lost(binding)
            self._updates.preserver.finish()
            self._updates.settle(unit.stores)
            self._stage.replaced(unit)
            for binding in written:
                write(binding, binding.resting.to("cpu"), self._pool, self._put)
            for binding, shown in known.items():
                if shown.version == unit.version:
                    known[binding] = _Shown(now[binding], unit.version + 1)
            unit.version += 1

    def _forget(self) -> None:
        """The values are gone."""
        with torch.inference_mode(False), torch.no_grad():
            for known in self._shown.values():
                for binding in known:
                    if binding.resting.is_floating_point():
                        binding.resting.fill_(float("nan"))
        self._shown.clear()


def _bits(binding: Binding) -> bytes:
    return binding.resting.detach().reshape(1).to("cpu").view(torch.uint8).numpy().tobytes()
