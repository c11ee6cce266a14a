"""plan(): the fastest settings within the budgets, by simulating those that could be it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from outcore.errors import BudgetError, ModelError, UsageError
from outcore.memory.budget import Budget
from outcore.memory.limits import spare
from outcore.memory.sizes import format_size, parse_size
from outcore.model.policies import Activations, Precision
from outcore.model.slices.heads import slices_loss
from outcore.optim.optimizer import Optimizer
from outcore.optim.optimizers import AdamW
from outcore.planning.kept import Kept
from outcore.planning.least import least, said, shortage
from outcore.planning.machine import Machine
from outcore.planning.machine_file import by_name
from outcore.planning.minimum import Needs, check, needs
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.plan import Plan, parts
from outcore.planning.ranking import Fit, fastest, seconds
from outcore.planning.settings import CHUNK_SIZES, Settings, candidates, dominates
from outcore.planning.simulator import Simulation, SlowError
from outcore.planning.strategies import Sizes, table
from outcore.planning.subject import Loss, Subject
from outcore.planning.this import this

MUCH_SLOWER = 1.5
"""A simulated step that takes so many times the fastest known is given up: more than by how much a disturbed timing of
what is kept can deceive (the note in `outcore.planning.ranking`), for a forward is a third of a step."""

PIECES = 1000
"""The most parameter chunks of a simulation. Beyond, it moves larger ones: peaks are coarser by one of them."""


def plan(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    batch: Mapping[str, Any],
    machine: Machine | str | Path = "this",
    budget: Budget | None = None,
    precision: Precision | None = None,
    activations: Activations | Sequence[Activations] | None = None,
    accumulate: int = 1,
    micro_batch: int | None = None,
    chunk_size: str | int | None = None,
    units: Sequence[str] | None = None,
    loss: Loss | None = None,
    ranks: int = 1,
) -> Plan:
    """What training a model will hold on each tier and how long a step will take, without running it.

    The model may be on ``meta``; it needs no weights and no accelerator, and is left as it is.

    Args:
        model: any module.
        optimizer: one of outcore's, made from the model's parameters; by default AdamW on all of them.
        batch: keyword arguments of the model's call. Of its tensors only shapes and dtypes matter.
        machine: a `Machine`, the name of a described one (``"rtx4090"``), a TOML file, or ``"this"``.
        budget: bytes per tier, within the machine's. What is left out is what the machine has, less a safety share; a
            disk's directory doesn't have to exist.
        precision: bf16 by default.
        activations: what is to be done with them, or a choice of which the fastest is taken; by default of all.
        accumulate: batches of a step.
        micro_batch: sequences of one pass; by default whatever is faster of those that divide the step.
        chunk_size: as `outcore.offload` takes it; by default whatever is faster.
        units: as `outcore.offload` takes them.
        loss: from the model's output to a scalar; by default its ``loss``, or the mean of its first tensor.
        ranks: for the memory table: over how many ranks ZeRO would shard.

    Raises:
        UsageError: a setting that can't mean anything.
        ModelError: the model can't be divided or traced.
        BudgetError: nothing fits; says the smallest budgets that would, and the nearest change.
    """
    if accumulate < 1 or ranks < 1:
        raise UsageError(f"accumulate and ranks must be at least 1, and are {accumulate} and {ranks}")
    where = machine_of(machine)
    on_host = where.device is None
    subject = Subject(model, optimizer or AdamW(model.parameters()), batch, loss, precision, units, on_host)
    planner = Planner(subject, where, limits_of(where, budget))
    sequences = subject.batch_size * accumulate
    if micro_batch is not None and (micro_batch < 1 or sequences % micro_batch):
        raise UsageError(f"a step of {sequences} sequences can't be cut into micro-batches of {micro_batch}")
    chunk_bytes = None if chunk_size is None else parse_size(chunk_size)
    ways = (activations,) if isinstance(activations, Activations) else activations
    if ways is not None and not ways:
        raise UsageError("activations is an empty choice: leave it out, or name at least one policy")
    return planner.best(sequences, accumulate, micro_batch, ways, chunk_bytes, budget, ranks)


def machine_of(machine: Machine | str | Path) -> Machine:
    """The machine that is meant.

    Raises:
        UsageError: there is no such machine.
    """
    if isinstance(machine, Machine):
        return machine
    return this() if machine == "this" else by_name(str(machine))


def limits_of(machine: Machine, budget: Budget | None) -> Limits:
    """The budgets in bytes, by the rules of `Budget`, on a machine that need not be here.

    Raises:
        UsageError: a device budget where there is no device.
        BudgetError: more is asked for than there is.
    """
    budget = budget or Budget()
    if budget.device is not None and machine.device is None:
        raise UsageError(
            f"{machine.name} computes on the CPU, where a device budget means nothing: leave it out"
        )
    device = machine.device
    if device is not None:
        device = spare("device", device) if budget.device is None else parse_size(budget.device)
    host = spare("host", machine.host) if budget.host is None else parse_size(budget.host)
    disks = budget.disks()
    free = spare("disk", machine.disk) if machine.disk else 0
    sizes = [disk.nbytes for disk in disks]
    disk = free if not disks or None in sizes else sum(size for size in sizes if size is not None)
    for tier, asked, there in (
        ("device", device or 0, machine.device or 0),
        ("host", host, machine.host),
        ("disk", disk, machine.disk),
    ):
        if asked > there:
            raise BudgetError(
                tier, asked, there, f"{machine.name} has no more: ask for less, or state its size"
            )
    return Limits(device, host, disk)


class Planner:
    """Tries settings of one model on one machine."""

    def __init__(self, subject: Subject, machine: Machine, limits: Limits) -> None:
        self._subject = subject
        self._machine = machine
        self._limits = limits
        self._on_host = machine.device is None
        self._timing = machine.timing()
        subject.taped = self._timing.taped
        self.tried = 0
        self._needs: dict[tuple[int, bool], Needs] = {}
        machine.rate(subject.precision.compute)  # refused before anything is traced

    def simulate(self, settings: Settings) -> Outcome:
        """A run with these settings.

        Raises:
            BudgetError: it doesn't fit.
        """
        return self.simulation(settings).run()

    def simulation(self, settings: Settings) -> Simulation:
        """A run with these settings, before its first step.

        Raises:
            BudgetError: its chunks don't fit.
        """
        subject, limits = self._subject, self._limits
        found = self._needed(settings)
        check(found, limits.host, limits.disk, limits.device)
        trace = subject.trace(settings.micro_batch, settings.activations)
        units, _ = subject.layout(max(settings.chunk_bytes, self._finest(settings.chunk_bytes)))
        self.tried += 1
        return Simulation(
            units,
            trace,
            self._machine,
            limits,
            accumulate=settings.accumulate,
            occupied=subject.occupied,
            found=found,
            timing=self._timing,
        )

    def _needed(self, settings: Settings) -> Needs:
        key = settings.chunk_bytes, settings.activations.microbatch is not None
        if key not in self._needs:
            units, points = self._subject.layout(settings.chunk_bytes)
            self._needs[key] = needs(units, points, key[1])
        return self._needs[key]

    def _finest(self, chunk_bytes: int) -> int:
        """The least bytes that move as one piece in a simulation; chunks that are smaller move together."""
        units, _ = self._subject.layout(chunk_bytes)
        return sum(unit.nbytes for unit in units) // PIECES

    def fits(self, settings: Settings, patience: float = math.inf) -> Outcome | None:
        """A run with these settings, if it fits.

        Args:
            patience: seconds of a step beyond which it is of no use.
        """
        try:
            return self.simulation(settings).run(patience)
        except (BudgetError, SlowError):
            return None
        except ModelError:
            if settings.activations.microbatch is None:
                raise
            return None  # blocks that can't run in slices

    def best(
        self,
        sequences: int,
        accumulate: int,
        micro_batch: int | None,
        activations: Sequence[Activations] | None,
        chunk_bytes: int | None,
        budget: Budget | None,
        ranks: int,
    ) -> Plan:
        """The fastest settings.

        Raises:
            BudgetError: none fits.
        """
        found: list[Fit] = []
        below = not self._on_host or self._limits.disk > 0
        for offloaded in (False, True) if below and activations is None else (False,):
            asks = (sequences, micro_batch, activations, chunk_bytes, self._subject.tokens)
            sliced_loss = slices_loss(self._subject.model)
            for settings in candidates(*asks, offloaded, sliced_loss) if not found else ():
                if any(dominates(fit.settings, settings) for fit in found):
                    continue
                found += self._fit(settings, found)
        if found and chunk_bytes is None:
            # the size of chunks matters least: it is tried on the best of the rest, if it can be told from the others
            leader = fastest(found).settings
            finest = self._finest(leader.chunk_bytes)
            for size in CHUNK_SIZES:
                if size != leader.chunk_bytes and max(size, leader.chunk_bytes) > finest:
                    found += self._fit(replace(leader, chunk_bytes=size), found)
        if not found:
            asked = Settings(
                micro_batch or sequences // accumulate,
                sequences // (micro_batch or sequences // accumulate),
                activations[-1] if activations else Activations("recompute"),
                chunk_bytes or CHUNK_SIZES[0],
            )
            try:  # the batch as it is, which need not be among the sizes that were tried
                found = [Fit(asked, self.simulate(asked), self._flops(asked))]
            except BudgetError as error:
                raise self._unfit(asked, error) from None
        return self._plan(fastest(found), budget, ranks)

    def _fit(self, settings: Settings, found: Sequence[Fit]) -> list[Fit]:
        """The settings with their outcome, if they fit and aren't much slower than the fastest known."""
        patience = MUCH_SLOWER * seconds(fastest(found), found) if found else math.inf
        outcome = self.fits(settings, patience)
        return [] if outcome is None else [Fit(settings, outcome, self._flops(settings))]

    def _flops(self, settings: Settings) -> int:
        trace = self._subject.trace(settings.micro_batch, settings.activations)
        return sum(trace.work.flops.values()) * settings.accumulate

    def _plan(self, fit: Fit, budget: Budget | None, ranks: int) -> Plan:
        subject, settings, outcome = self._subject, fit.settings, fit.outcome
        units, points = subject.layout(settings.chunk_bytes)
        trace = subject.trace(settings.micro_batch, settings.activations)
        works = parts(outcome)
        bottleneck = max(works, key=works.__getitem__)
        rows = table(Sizes.of(units, subject.facts.buffers), trace, self._machine, ranks, outcome.peak)
        limits = self._limits
        disk = (budget.disk if budget is not None else None) or None
        return Plan(
            budget=Budget(device=limits.device, host=limits.host, disk=disk),
            precision=subject.precision,
            activations=settings.activations,
            chunk_bytes=settings.chunk_bytes,
            micro_batch=settings.micro_batch,
            accumulate=settings.accumulate,
            tokens=trace.tokens * settings.accumulate,
            machine=self._machine,
            limits=limits,
            least=least(units, points, trace, subject.occupied, self._on_host, settings.accumulate).limits,
            facts=subject.facts,
            flops=fit.flops,
            outcome=outcome,
            floor=works[bottleneck],
            bottleneck=bottleneck,
            table=rows,
            ranks=ranks,
            tried=self.tried,
            units=subject.patterns,
            profile=trace.profile(),
            kept=Kept.of(subject.rule, subject.precision.dtype),
        )

    # -- what would do ----------------------------------------------------------------------------

    def _unfit(self, asked: Settings, refused: BudgetError) -> BudgetError:
        """Says what would do.

        Args:
            refused: by the simulated run, which tells the tier where each single moment would have had room.
        """
        units, points = self._subject.layout(asked.chunk_bytes)
        trace = self._subject.trace(asked.micro_batch, asked.activations)
        low = least(units, points, trace, self._subject.occupied, self._on_host, asked.accumulate)
        short = shortage(low.limits, low.whole, self._limits)
        tier, needed, there = short or (refused.tier, refused.needed, refused.budget)
        remedy = f"the smallest budgets that would do with {asked} are {said(low.limits)}"
        changes = list(self._changes(asked, low.limits))
        if changes:
            remedy += f"; or {', or '.join(changes)}"
        return BudgetError(tier, needed, there, remedy)

    def _changes(self, asked: Settings, low: Limits) -> Iterator[str]:
        """Single changes that make it fit, the gentlest first."""
        recomputed = replace(asked, activations=Activations("recompute"))
        if asked.activations.blocks == "keep" and self.fits(recomputed):
            yield "recompute activations"
        size, whole = asked.micro_batch, asked.micro_batch * asked.accumulate
        while size > 1:
            size = max(d for d in range(1, size) if whole % d == 0)
            smaller = replace(asked, micro_batch=size, accumulate=whole // size)
            if self.fits(smaller):
                yield f"use micro-batches of {size}"
                break
        limits = self._limits
        short = low.host + low.disk - limits.host - limits.disk
        if low.host <= limits.host and (low.device or 0) <= (limits.device or 0) and short > 0:
            yield f"add {format_size(short)} of disk"
