"""Sites where there are other ranks, and the choice of a site.

A rank keeps windows of runs, whatever it computes on (`Joined`). What it computes on decides where its gradients come
from and where parameters are gathered to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from outcore.chunks.layout import Run
from outcore.chunks.pool import Pool
from outcore.chunks.replacers import Belady, Replacer
from outcore.chunks.store import Reserve, RunStore, Span, gradient_store
from outcore.errors import UsageError
from outcore.memory.budget import Budget
from outcore.memory.device import free_bytes
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger
from outcore.memory.limits import Asked, TierLimits
from outcore.memory.shared import share_of
from outcore.model.descent import Descent
from outcore.model.fresh_stage import RankedFreshStage
from outcore.model.gathering import Gathering
from outcore.model.host_frames import HostFrames, frame_bytes
from outcore.model.ranked_device_stage import Descending, RankedDeviceStage
from outcore.model.ranked_stage import RankedStage, ShardedStage
from outcore.model.replicas import Replicas
from outcore.model.saved.carriers import Carrier
from outcore.model.shared_frames import shared_frames
from outcore.model.sites import DeviceSite, HostSite, Site
from outcore.model.stage import Stage
from outcore.model.summing import Arrivals, Here, Summing
from outcore.model.supply import Chunks, Gathered, Supply
from outcore.model.unit import Extra, Unit
from outcore.model.weights import Source, agreed
from outcore.optim.gradients import Gradients
from outcore.optim.kernels import workers
from outcore.optim.reduction import (
    Reduction,
    largest_own_chunk,
    own_gradient_bytes,
    piece_bytes,
    staging_bytes,
    wider_bytes,
)
from outcore.optim.updates import Updates
from outcore.parallel.exchange import Exchange, SharedExchange, WireExchange
from outcore.parallel.node import can_share
from outcore.parallel.ranks import Ranks, World
from outcore.trace.clock import Clock
from outcore.trace.schedule import Schedule


class Joined:
    """What a site does where there are other ranks: it keeps its share.

    Args:
        world: the ranks.
        shares: whether this rank can use memory that ranks of a node share.
    """

    def __init__(self, world: World, shares: bool) -> None:
        self._world = world
        self._shares = can_share(world, shares)
        self._exchange: type[Exchange] = SharedExchange if can_share(world, True) else WireExchange
        self._states = world.sharding.states
        self._eager = self._states in ("parameters", "gradients") and world.sharding.sums == "backward"
        self._keeps = self._states in ("gradients", "optimizer")

    @property
    def sharded(self) -> bool:
        """Whether parameters must be gathered."""
        return self._states != "none"

    def share(self, run: Run) -> Run:
        share = run.share(self._world.slices.size)
        if not self.sharded:
            return run.seamed(share)
        first = self._world.slices.number * share
        return run.window(first, first + share)

    def extra(self, units: Sequence[Unit]) -> Extra:
        size = self._world.slices.size
        stores = [store for unit in units for store in unit.stores]
        working = staging_bytes(stores, size, self._exchange) + largest_own_chunk(stores)
        sums_at_step = self._world.sharding.sums == "step"
        gradients = 0 if self._eager else sum(own_gradient_bytes(store, sums_at_step) for store in stores)
        gradients += sum(wider_bytes(store) for store in stores)

        def frame(unit: Unit) -> int:
            return sum(frame_bytes(store, size) for store in unit.stores)

        if not self.sharded:
            return Extra(working=working, total=gradients)
        if not self._keeps:
            return Extra(frame, working, gradients)
        frames = sum(map(frame, units))
        if self._shares:
            parts = (share_of(frame_bytes(store, size), size) for unit in units for store in unit.stores)
            frames = sum(parts)
        return Extra(working=working + frames, total=frames + gradients)

    def source(self, source: Source) -> Source:
        return agreed(source, self._world)

    def replacer(self, schedule: Schedule, trains: bool, room: Callable[[], int]) -> Replacer:
        return Belady(schedule)  # what is gathered ahead takes room that an even share would keep from it

    def carrier(self, pool: Pool, ledger: Ledger) -> Carrier:
        raise UsageError("several ranks can't offload activations yet: let blocks keep or recompute them")

    # -- parts of a stage ---------------------------------------------------------------------------

    def greet(self, units: Sequence[Unit], ledger: Ledger) -> None:
        """Make sure that all ranks are about to train the same model."""
        self._world.report_to(ledger)
        self._world.same(
            _layout(units, self._world),
            "the layout of the model",
            "give all of them the same model and settings",
        )

    def own_stores(self, units: Sequence[Unit], reserve: Reserve) -> Mapping[RunStore, RunStore]:
        """From the trained runs as they are kept to chunks for this rank's own gradients of the whole run."""
        return {
            store: gradient_store(store.name, store.run.entire, reserve)
            for unit in units
            for store in unit.stores
            if store.run.trained
        }

    def summing(
        self,
        units: Sequence[Unit],
        own: Gradients,
        stores: Mapping[RunStore, RunStore],
        gradients: Gradients,
        pool: Pool,
        arrivals: Arrivals,
    ) -> Summing:
        """What sums gradients over ranks."""
        largest = piece_bytes(list(stores), self._world.slices.size, self._exchange.LARGEST)
        exchange = self._exchange.among(self._world, largest)
        reduction = Reduction(own, gradients, stores, self._world, pool, exchange)
        return Summing(units, own, stores, reduction, self._world, arrivals, self._eager)

    def gathering(
        self,
        units: Sequence[Unit],
        pool: Pool,
        summing: Summing,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
        pinned: Reserve | None,
        stays: bool = False,
    ) -> tuple[HostFrames, Gathering]:
        """What gathers parameters on the host.

        Args:
            pinned: makes the memory of frames, where a device must reach it.
            stays: whether what is used twice in a row stays in between, see `Gathering`.
        """
        if self._shares:
            frames: HostFrames = shared_frames(units, pool, self._world, self._keeps)
        else:
            frames = HostFrames(units, pool, self._world, pinned or reserve)
        return frames, Gathering(units, frames, summing, clock, ledger, updates, stays)


class RankedHostSite(Joined, HostSite):
    """The CPU computes."""

    def __init__(self, limits: TierLimits, world: World) -> None:
        HostSite.__init__(self, limits)
        Joined.__init__(self, world, world.sharding.states != "none" or not limits.disk)
        self.ranks: Ranks = world
        self._replicas = Replicas(world)

    def span(self, run: Run) -> Span:
        if self._is_replica(run):
            return self._replicas.span(run)
        if not self.sharded:
            return super().span(run)
        return lambda offset, nbytes: self._frames.place(nbytes)  # no chunk is used where it lies

    def settle(self, run: Run, store: RunStore) -> None:
        if self._is_replica(run):
            self._spans[store] = self._replicas.last(store)
        elif not self.sharded:
            super().settle(run, store)

    def _is_replica(self, run: Run) -> bool:
        """Whether all ranks of the node have the run in common."""
        return self._shares and not self.sharded and not run.trained

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        self.greet(units, ledger)
        stores = self.own_stores(units, self._frames.place)
        own = Gradients(stores.values(), pool, workers())
        summing = self.summing(units, own, stores, gradients, pool, Here())
        if not self.sharded:
            self._replicas.settle()
            return RankedStage(pool, self._spans, own, summing, self._replicas)
        frames, gathering = self.gathering(
            units, pool, summing, clock, ledger, updates, None, not self._keeps
        )
        return ShardedStage(pool, own, summing, frames, gathering, self._keeps, self._replicas)


class RankedDeviceSite(Joined, DeviceSite):
    """An accelerator computes, and ranks are joined through the host."""

    def __init__(self, device: torch.device, limits: TierLimits, prefetch: bool, world: World) -> None:
        DeviceSite.__init__(self, device, limits, prefetch)
        Joined.__init__(self, world, False)  # what a device reaches is page-locked by each rank
        self.ranks: Ranks = world

    def extra(self, units: Sequence[Unit]) -> Extra:
        joined = Joined.extra(self, units)
        return replace(joined, working=joined.working + self.lifting(units))

    def furnish(
        self,
        units: Sequence[Unit],
        pool: Pool,
        gradients: Gradients,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
    ) -> Stage:
        self.greet(units, ledger)
        ledger.budget["device"] = self._budget
        stores = self.own_stores(units, self.working())
        own = Gradients(stores.values(), pool, workers())
        descent = Descent(self.device, self._streams, own, pool, self._pinned, ledger, _unmeasured)
        summing = self.summing(units, own, stores, gradients, pool, Descending(descent))
        supply: Supply = Chunks(pool, updates)
        if self.sharded:
            pinned = self._pinned.region
            frames, gathering = self.gathering(units, pool, summing, clock, ledger, updates, pinned)
            supply = Gathered(gathering, frames, self._keeps)
        stage = RankedDeviceStage if self._offers.resizing else RankedFreshStage
        return stage(
            self.device,
            units,
            pool,
            supply,
            descent,
            summing,
            self._streams,
            clock,
            ledger,
            self._budget,
            self._prefetch,
        )


def _unmeasured(store: RunStore) -> None:
    """What one rank has of a run is no norm's part: the sums over ranks are measured."""


def _layout(units: Sequence[Unit], world: World) -> bytes:
    """What all ranks must have in common."""
    said: list[str] = [world.sharding.states, world.sharding.sums]
    for unit in units:
        said.append(unit.name)
        for store in unit.stores:
            run = store.run.entire
            said.append(f"{run.dtype} {run.trained} {run.numel} {run.cuts} {store.planes}")
            said += [f"{slot.index} {tuple(slot.shape)}" for slot in run.slots]
    return "\n".join(said).encode()


def choose(place: torch.device, budget: Budget, prefetch: bool, ranks: Ranks) -> tuple[Site, TierLimits]:
    """The site of a run, and its limits.

    Raises:
        UsageError, BudgetError: the budget is not one for this machine.
    """
    on_host = place.type == "cpu"
    survey = budget.survey(None if on_host else free_bytes(place))
    asked = ranks.nearby(survey.asked.pack(), "the budgets of one machine")
    limits = survey.limits(ranks.neighbours, Asked.together(asked))
    if on_host:
        return RankedHostSite(limits, ranks) if isinstance(ranks, World) else HostSite(limits), limits
    if isinstance(ranks, World):
        return RankedDeviceSite(place, limits, prefetch, ranks), limits
    return DeviceSite(place, limits, prefetch), limits


def refusal(whole: bool, planned: bool) -> str:
    """Why several ranks can't do this; empty if they can.

    Args:
        whole: the update needs whole parameters.
        planned: the settings are a plan's.
    """
    if whole:
        return (
            "outcore.Foreign needs whole parameters, which no rank has: use one of outcore's own optimizers"
        )
    if planned:
        return "a plan is for one rank yet: give several their budget and settings by hand"
    return ""
