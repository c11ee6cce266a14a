"""Where a model computes, and what follows from it: which memory its chunks take, its stage and its gauge.

This is the one place that knows whether there is a device tier, and whether there are other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from outcore.chunks.layout import Run
from outcore.chunks.pool import Pool
from outcore.chunks.store import Reserve, RunStore, Span, gradient_store, span_bytes
from outcore.errors import UsageError
from outcore.memory.budget import Budget, Limits
from outcore.memory.device import Streams, free_bytes
from outcore.memory.heap import give_back
from outcore.memory.host import Region, reserve
from outcore.memory.ledger import Ledger
from outcore.memory.pinned import PinnedMemory
from outcore.model.descent import Descent
from outcore.model.device_stage import DeviceStage
from outcore.model.policies import Activations
from outcore.model.ranked_stage import RankedStage, ShardedStage, frame_bytes
from outcore.model.saved.carriers import Carrier, HostCarrier
from outcore.model.saved.device_carrier import DeviceCarrier
from outcore.model.stage import HostStage, Stage
from outcore.model.unit import Extra, Unit
from outcore.model.weights import Compared, Source
from outcore.optim.gradients import Gradients
from outcore.optim.kernels import workers
from outcore.optim.reduction import Reduction, largest_own_chunk, own_gradient_bytes, staging_bytes
from outcore.optim.updates import Updates
from outcore.parallel.ranks import Alone, Ranks, World
from outcore.trace.clock import Clock
from outcore.trace.gauge import Gauge, MeteredGauge

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

    def __init__(self) -> None:
        self.ranks: Ranks = Alone()

    def share(self, run: Run) -> Run:
        return run

    def extra(self, units: Sequence[Unit]) -> Extra:
        return Extra()

    def source(self, source: Source) -> Source:
        return source


class HostSite(Lone):
    """The CPU computes where the chunks lie."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self._limits = limits
        self._span: Region | None = None
        self._spans: dict[RunStore, Region] = {}

    def span(self, run: Run) -> Span:
        self._span = reserve(span_bytes(run))
        return self._span.slice

    def working(self) -> Reserve:
        return reserve

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
        return HostCarrier(pool)

    def gauge(self, stage: Stage, pool: Pool, ledger: Ledger, roomy: bool, outside: Outside) -> Gauge:
        settled = _nothing if roomy else give_back
        tell = partial(self.ranks.tell, "the activations of a pass")
        return MeteredGauge(
            self.device, "host", pool, ledger, self._limits.host, roomy, outside, settled, tell
        )


class RankedSite(HostSite):
    """The CPU computes, and there are other ranks."""

    def __init__(self, limits: Limits, world: World) -> None:
        super().__init__(limits)
        self.ranks = self._world = world
        self._states = world.sharding.states
        self._eager = self._states in ("parameters", "gradients")
        self._keeps = self._states in ("gradients", "optimizer")

    def share(self, run: Run) -> Run:
        share = run.share(self._world.slices.size)
        if self._states == "none":
            return run.seamed(share)
        first = self._world.slices.number * share
        return run.window(first, first + share)

    def extra(self, units: Sequence[Unit]) -> Extra:
        size = self._world.slices.size
        stores = [store for unit in units for store in unit.stores]
        working = staging_bytes(stores, size) + largest_own_chunk(stores)
        gradients = 0 if self._eager else sum(own_gradient_bytes(store) for store in stores)

        def frame(unit: Unit) -> int:
            return sum(frame_bytes(store, size) for store in unit.stores)

        if self._states == "none":
            return Extra(working=working, total=gradients)
        if not self._keeps:
            return Extra(frame, working, gradients)
        frames = sum(map(frame, units))
        return Extra(working=working + frames, total=frames + gradients)

    def source(self, source: Source) -> Source:
        return Compared(source, self._world)

    def span(self, run: Run) -> Span:
        if self._states == "none":
            return super().span(run)
        return lambda offset, nbytes: reserve(nbytes)  # no chunk is used where it lies

    def settle(self, run: Run, store: RunStore) -> None:
        if self._states == "none":
            super().settle(run, store)

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        world = self._world
        world.report_to(ledger)
        world.same(
            _layout(units, world), "the layout of the model", "give all of them the same model and settings"
        )
        stores = {
            store: gradient_store(store.name, store.run.entire)
            for unit in units
            for store in unit.stores
            if store.run.trained
        }
        own = Gradients(stores.values(), pool, workers())
        reduction = Reduction(own, gradients, stores, world, pool)
        if self._states == "none":
            return RankedStage(units, pool, self._spans, own, stores, reduction, world, self._eager)
        return ShardedStage(
            units,
            pool,
            own,
            stores,
            reduction,
            world,
            self._eager,
            self._keeps,
            clock,
            ledger,
            updates,
        )

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        raise UsageError("several ranks can't offload activations yet: let blocks keep or recompute them")


def _layout(units: Sequence[Unit], world: World) -> bytes:
    """What all ranks must have in common."""
    said: list[str] = [world.sharding.states]
    for unit in units:
        said.append(unit.name)
        for store in unit.stores:
            run = store.run.entire
            said.append(f"{run.dtype} {run.trained} {run.numel} {run.cuts} {store.planes}")
            said += [f"{slot.index} {tuple(slot.shape)}" for slot in run.slots]
    return "\n".join(said).encode()


class DeviceSite(Lone):
    """An accelerator computes; chunks that cross the link lie in page-locked memory."""

    def __init__(self, device: torch.device, limits: Limits, prefetch: bool) -> None:
        assert limits.device is not None
        super().__init__()
        self.device = device
        self._budget = limits.device
        self._prefetch = prefetch
        self._pinned = PinnedMemory(limits.host)
        self._streams: Streams | None = None

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
        streams = self._streams = Streams(self.device)
        descent = Descent(self.device, streams, gradients, pool, self._pinned, ledger)
        return DeviceStage(
            self.device, units, pool, descent, streams, clock, ledger, self._budget, updates, self._prefetch
        )

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        assert self._streams is not None, "the stage comes first"
        return DeviceCarrier(self.device, pool, self._pinned, self._streams, ledger)

    def gauge(self, stage: Stage, pool: Pool, ledger: Ledger, roomy: bool, outside: Outside) -> Gauge:
        assert isinstance(stage, DeviceStage)
        return MeteredGauge(self.device, "device", stage, ledger, self._budget, False, outside, _nothing)


def choose(place: torch.device, budget: Budget, prefetch: bool, ranks: Ranks) -> tuple[Site, Limits]:
    """The site of a run, and its limits.

    Raises:
        UsageError, BudgetError: the budget is not one for this machine.
    """
    if place.type != "cpu":
        limits = budget.limits(free_bytes(place))
        return DeviceSite(place, limits, prefetch), limits
    limits = budget.limits(None, ranks.neighbours)
    return RankedSite(limits, ranks) if isinstance(ranks, World) else HostSite(limits), limits


def refusal(place: torch.device, whole: bool, planned: bool, activations: Activations) -> str:
    """Why several ranks can't do this; empty if they can.

    Args:
        whole: the update needs whole parameters.
        planned: the settings are a plan's.
    """
    if place.type != "cpu":
        return f"several ranks can't compute on {place.type} yet: give device='cpu', or run one process"
    if whole:
        return (
            "outcore.Foreign needs whole parameters, which no rank has: use one of outcore's own optimizers"
        )
    if planned:
        return "a plan is for one rank yet: give several their budget and settings by hand"
    if activations.microbatch is not None or activations.loss_slice is not None:
        return "several ranks can't run a batch in slices yet: leave microbatch and loss_slice out"
    return ""


def _nothing() -> None:
    pass
