"""Where a model computes, and what follows from it: which memory its chunks take, its stage and its gauge.

A site is made for a device and for a company: `Lone` here, or `Joined` in `outcore.model.ranked_sites`, which
is the one place that knows of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from outcore.chunks.layout import Run
from outcore.chunks.pool import Pool
from outcore.chunks.replacers import Belady, Replacer
from outcore.chunks.store import Reserve, RunStore, Span, span_bytes
from outcore.errors import UsageError
from outcore.memory.device import NoStreams, Streams, offers
from outcore.memory.frames import Frames
from outcore.memory.heap import Rule, give_back
from outcore.memory.host import Region, reserve
from outcore.memory.ledger import Ledger
from outcore.memory.limits import TierLimits
from outcore.memory.pinned import PinnedMemory
from outcore.memory.place import Place
from outcore.model.descent import Descent
from outcore.model.device_stage import DeviceStage
from outcore.model.fresh_stage import FreshStage, lift_bytes
from outcore.model.saved.carriers import Carrier, HostCarrier
from outcore.model.saved.device_carrier import DeviceCarrier
from outcore.model.stage import HostStage, Stage
from outcore.model.supply import Chunks
from outcore.model.unit import Extra, Unit
from outcore.model.weights import Source
from outcore.optim.gradients import Gradients
from outcore.optim.updates import Updates
from outcore.parallel.ranks import Alone, Ranks
from outcore.trace.clock import Clock
from outcore.trace.gauge import Gauge, MeteredGauge, Unmeasured
from outcore.trace.residents import Residents
from outcore.trace.schedule import Schedule

Outside = Callable[[int], None]


class Site(Protocol):
    """Makes what depends on the device that computes."""

    device: torch.device
    ranks: Ranks

    def share(self, run: Run) -> Run:
        """What of a run is kept here."""

    def extra(self, units: Sequence[Unit]) -> Extra:
        """What is needed beside chunks."""

    def source(self, source: Source) -> Source:
        """First values as they are to be written, from those that were found here."""

    def span(self, run: Run) -> Span:
        """Places for the parameter chunks of a run."""

    def working(self) -> Reserve:
        """Places for chunks that the device writes."""

    def plain(self) -> Reserve:
        """Places for chunks that only the host reads and writes."""

    def replacer(self, schedule: Schedule, trains: bool, room: Callable[[], int]) -> Replacer:
        """Who leaves the host first.

        Args:
            room: bytes for chunks.
        """

    def settle(self, run: Run, store: RunStore) -> None:
        """The run that a span was last asked for became this store."""

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        """The stage."""

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        """What takes saved tensors to the next tier, once there is a stage.

        Raises:
            UsageError: there is no such tier, or not for several ranks.
        """

    def gauge(self, stage: Stage, pool: Pool, ledger: Ledger, roomy: bool, outside: Outside) -> Gauge:
        """What keeps room for activations."""


class Lone:
    """What a site does where there is one rank: it keeps everything."""

    ranks: Ranks = Alone()

    def __init__(self) -> None:
        self._frames = Frames()

    def share(self, run: Run) -> Run:
        return run

    def extra(self, units: Sequence[Unit]) -> Extra:
        return Extra()

    def source(self, source: Source) -> Source:
        return source

    def plain(self) -> Reserve:
        return self._frames.place

    def replacer(self, schedule: Schedule, trains: bool, room: Callable[[], int]) -> Replacer:
        return Belady(schedule) if trains else Residents(schedule, room)


class HostSite(Lone):
    """The CPU computes where the chunks lie."""

    def __init__(self, limits: TierLimits) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._limits = limits
        self._span: Region | None = None
        self._spans: dict[RunStore, Place] = {}

    def span(self, run: Run) -> Span:
        self._span = reserve(span_bytes(run))
        return self._span.slice

    def working(self) -> Reserve:
        return self._frames.place

    def settle(self, run: Run, store: RunStore) -> None:
        assert self._span is not None
        self._spans[store] = self._span

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        return HostStage(pool, self._spans, gradients)

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        if not self._limits.disk:
            raise UsageError(
                "where the CPU computes, activations are offloaded to a disk: name one, Budget(disk=DIR), or let "
                "blocks keep or recompute them"
            )
        return HostCarrier(pool, self._frames)

    def gauge(self, stage: Stage, pool: Pool, ledger: Ledger, roomy: bool, outside: Outside) -> Gauge:
        settled = _nothing if roomy else give_back
        Rule.of(self._limits.host, roomy).apply()
        tell = partial(self.ranks.tell, "the activations of a pass")
        return MeteredGauge(
            self.device, "host", pool, ledger, self._limits.host, roomy, outside, settled, tell
        )


class DeviceSite(Lone):
    """An accelerator computes; chunks that cross the link lie in page-locked memory.

    What the device offers decides how: one without streams does all in turn, and one whose storages can't be given
    back gets new tensors with each lift.
    """

    def __init__(self, device: torch.device, limits: TierLimits, prefetch: bool) -> None:
        assert limits.device is not None
        super().__init__()
        self.device = device
        self._budget = limits.device
        self._prefetch = prefetch
        self._offers = found = offers(device)
        self._streams = Streams(device) if found.streams and found.resizing else NoStreams(device)
        self._pinned = PinnedMemory(limits.host, locks=found.streams)

    def extra(self, units: Sequence[Unit]) -> Extra:
        return Extra(working=self.lifting(units))

    def lifting(self, units: Sequence[Unit]) -> int:
        """Host bytes that a lift takes beside chunks."""
        return 0 if self._offers.resizing else lift_bytes(units)

    def span(self, run: Run) -> Span:
        return lambda offset, nbytes: self._pinned.region(nbytes)

    def working(self) -> Reserve:
        return self._pinned.region

    def settle(self, run: Run, store: RunStore) -> None:
        pass

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        ledger.budget["device"] = self._budget
        streams = self._streams
        descent = Descent(self.device, streams, gradients, pool, self._pinned, ledger, gradients.measure)
        supply = Chunks(pool, updates)
        stage = DeviceStage if self._offers.resizing else FreshStage
        return stage(
            self.device, units, pool, supply, descent, streams, clock, ledger, self._budget, self._prefetch
        )

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        if isinstance(self._streams, NoStreams):
            raise UsageError(
                "a device without streams can't offload activations: let blocks keep or recompute them"
            )
        return DeviceCarrier(self.device, pool, self._pinned, self._streams, ledger)

    def gauge(self, stage: Stage, pool: Pool, ledger: Ledger, roomy: bool, outside: Outside) -> Gauge:
        assert isinstance(stage, DeviceStage)
        if not self._offers.storages:
            return Unmeasured()
        tell = partial(self.ranks.tell, "the activations of a pass")
        return MeteredGauge(
            self.device, "device", stage, ledger, self._budget, False, outside, _nothing, tell
        )


def _nothing() -> None:
    pass
