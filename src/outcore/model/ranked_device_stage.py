"""Computing on an accelerator as one of several ranks, which are joined through the host.

Values are lifted from where all of them are on the host: from chunks, or from the frame into which ranks gather their
slices. Gradients come down as on one rank and are summed there. So ranks may compute on devices of any kind,
each on another: what they do together is the same for all (`outcore.model.gathering`, `outcore.model.summing`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from outcore.chunks.pool import Pool
from outcore.chunks.store import RunStore
from outcore.memory.device import Streams
from outcore.memory.ledger import Ledger
from outcore.model.descent import Descent
from outcore.model.device_stage import DeviceStage
from outcore.model.summing import Summing
from outcore.model.supply import Supply
from outcore.model.unit import Binding, Unit
from outcore.trace.clock import Clock


class Descending:
    """Gradients come down from a device. Implements `outcore.model.summing.Arrivals`."""

    def __init__(self, descent: Descent) -> None:
        self._descent = descent
        self._before: set[Unit] = set()

    def ripe(self, closed: Sequence[Unit]) -> Sequence[Unit]:
        """Those that were closed at the gather before: their copies had the time of a unit."""
        found = [unit for unit in closed if unit in self._before]
        self._before = set(closed)
        return found

    def arrive(self, stores: Collection[RunStore]) -> None:
        self._descent.arrive(stores)


class RankedDeviceStage(DeviceStage):
    """Gradients are summed over ranks after they came down. Implements `outcore.model.stage.Stage`."""

    def __init__(
        self,
        device: torch.device,
        units: Sequence[Unit],
        pool: Pool,
        supply: Supply,
        descent: Descent,
        summing: Summing,
        streams: Streams,
        clock: Clock,
        ledger: Ledger,
        budget: int,
        prefetch: bool,
    ) -> None:
        super().__init__(device, units, pool, supply, descent, streams, clock, ledger, budget, prefetch)
        self._summing = summing

    def open(self, unit: Unit) -> None:
        if not self._supply.ready(unit):
            self._settle_all()  # what is lifted holds frames on the host, where this unit's may have to come
        super().open(unit)

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        super().collect(unit, self._summing.home(binding), gradient)
        self._look_ahead()  # a gather may have ended meanwhile

    def _landing(self, unit: Unit) -> Sequence[RunStore]:
        return self._summing.runs(unit)

    def backward_over(self) -> None:
        self._summing.pass_over()

    def settle_gradients(self) -> None:
        super().settle_gradients()
        self._summing.settle()

    def collected(self) -> set[int]:
        return self._summing.collected()

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._summing.forget()
