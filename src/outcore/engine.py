"""What is behind one offloaded model: wires the rooms together, decides nothing itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.chunks.pool import Pool
from outcore.errors import ModelError
from outcore.memory import ending
from outcore.memory.disk import DiskTier
from outcore.memory.heap import give_back, keep_little
from outcore.memory.ledger import Ledger
from outcore.memory.limits import TierLimits
from outcore.memory.refusal import allocating
from outcore.model import weights as weights_of
from outcore.model.activations import treat_blocks, ways_of
from outcore.model.assembly import Assembly
from outcore.model.backward import BackwardPass
from outcore.model.hooks import PointHooks
from outcore.model.laps import Laps
from outcore.model.misuse import Misuse
from outcore.model.owners import Owners
from outcore.model.placement import move_buffers, replace_data
from outcore.model.policies import Activations, offloads
from outcore.model.readers import Readers
from outcore.model.residency import Residency
from outcore.model.rowless import NothingCounted
from outcore.model.saved.seam import NothingSaved, Saved
from outcore.model.saved.store import SavedTensors
from outcore.model.singles import Singles
from outcore.model.sites import Site
from outcore.model.slices.heads import asks_for_slices, slice_loss
from outcore.model.unit import Unit
from outcore.model.units import discover
from outcore.optim.claims import Claim
from outcore.optim.due import Due
from outcore.optim.gradients import Gradients
from outcore.optim.kernels import GradTransform, Rule, workers
from outcore.optim.optimizer import Optimizer
from outcore.optim.pipeline import Pipeline
from outcore.optim.scaling import LossScale
from outcore.optim.updates import NoUpdates, Updates
from outcore.planning.effective import Effective
from outcore.planning.minimum import Needs, check, needs
from outcore.planning.outcome import Limits
from outcore.planning.prelude import prelude
from outcore.trace.clock import Clock
from outcore.trace.profile import Profile
from outcore.trace.schedule import Schedule


class Engine:
    """Everything behind one offloaded model. What takes files, threads or hooks enters its end as it is made."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        limits: TierLimits,
        site: Site,
        settings: Effective,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rule: Rule | None = None if optimizer is None else optimizer.rule
        self.precision, prefetch = settings.precision, settings.prefetch
        self.plans, self.points = discover(model, settings.units)
        if not self.plans:
            raise ModelError("the model has no parameters")
        self.ledger = Ledger(budget={"host": limits.host})
        self.activations = settings.activations
        self.ways = ways_of(self.points, self.activations)
        self._slices_loss = asks_for_slices(model, self.activations)
        self.ranks = site.ranks
        sliced = self.activations.microbatch is not None
        dtype, chunk_bytes = self.precision.dtype, settings.chunk_bytes
        self.units = Assembly(model, self.plans, optimizer, site, dtype, chunk_bytes, sliced).units()
        found = needs(self.units, self.points, sliced, site.extra(self.units))
        disk_bytes = sum(disk.nbytes for disk in limits.disk)
        check(found, limits.host, disk_bytes, limits.device)
        self.misuse = Misuse(self.units, optimizer)
        if limits.disk:
            self.ledger.budget["disk"] = disk_bytes
        budgets = Limits(limits.device, limits.host, disk_bytes)
        self.prelude = prelude(model, optimizer, self.ranks.size, settings, budgets, found.total)
        with ExitStack() as end:
            self._furnish(limits, site, found, prefetch, end)
            self._end = end.pop_all()

    # -- construction -----------------------------------------------------------------------------

    def _furnish(self, limits: TierLimits, site: Site, found: Needs, prefetch: bool, end: ExitStack) -> None:
        """Everything that takes something of the machine, and what gives it back."""
        self.disk = DiskTier.open(limits.disk, ledger=self.ledger) if limits.disk else None
        end.callback(keep_little)
        if self.disk is not None:
            end.callback(self.disk.close)
        schedule = Schedule()
        replacer = site.replacer(schedule, self.optimizer is not None, lambda: self.pool.floor)
        self.pool = Pool(self.ledger, self.disk, limits.host, schedule, replacer, prefetch, found.working)
        end.callback(self.pool.close)
        self.clock = Clock(schedule, self.pool)
        stores = [store for unit in self.units for store in unit.stores]
        self.gradients = Gradients(stores, self.pool, workers(), self.ranks.all_sums)
        self._largest_update = found.update
        self._spare = min(
            limits.host - found.working, limits.host + self.ledger.budget.get("disk", 0) - found.total
        )
        self.pipeline = (
            None
            if self.rule is None
            else Pipeline(
                self.rule, stores, self.gradients, self.pool, self.clock, self.ledger, workers(), prefetch
            )
        )
        self.updates: Updates = self.pipeline or NoUpdates()
        self.stage = site.furnish(
            self.units, self.pool, self.gradients, self.clock, self.ledger, self.updates
        )
        end.callback(self.stage.shut)
        roomy = 2 * found.total <= limits.host
        self.gauge = site.gauge(self.stage, self.pool, self.ledger, roomy, self.misuse.refuse_resting)
        self.owners = Owners()
        self.saver = self._saver(site)
        self.saved: Saved = self.saver or NothingSaved()
        end.callback(self.saved.shut)
        here = self.ranks.size == 1 and self.stage.lasting
        self.singles = Singles(self.units, self.stage, self.updates, self.pool, self.rule, here)
        self.residency = Residency(
            self.stage,
            self.clock,
            self.gradients,
            self.gauge,
            self.updates,
            self.ledger,
            self.ranks,
            self.saved,
            self.owners,
            self.singles,
        )
        self.backward = BackwardPass(self.residency, self.stage.gradients_complete, self._backward_over)
        end.callback(self.backward.abandon)
        end.callback(self.gauge.end)
        if self.pipeline is not None:
            end.callback(self.pipeline.close)
        if self.saver is not None:
            self.saver.read = self.backward.read
        self.rowless = NothingCounted(self.backward.start)
        self.readers: Readers | None = None
        ending.enter(self)
        end.callback(ending.leave, self)

    def _saver(self, site: Site) -> SavedTensors | None:
        """What keeps activations on other tiers, if any block wants that."""
        if not any(map(offloads, self.ways.values())):
            return None
        carrier = site.carrier(self.pool, self.ledger)
        return SavedTensors(
            carrier, self.pool, self.stage.device, self.units, self.owners, self.model.buffers
        )

    def fill(self, source: weights_of.Source) -> None:
        """Write the first values, unit by unit; afterwards the model itself holds its buffers alone."""
        resident = 0
        for unit, plan in zip(self.units, self.plans, strict=True):
            weights_of.fill(unit, plan, source, self.pool, self.rule, self._spare)
            for binding in unit.bindings:
                binding.resting = self.stage.resting(binding)
                if not self.singles.has(binding):
                    self.misuse.rests(binding)
                replace_data(binding.parameter, binding.resting)
                resident += binding.resting.element_size()
        self.ranks.agree("the end of the first values")  # each wrote what it keeps
        give_back()  # what the heap kept of that is room for chunks
        resident += move_buffers(self.model, self.stage.device)
        self.stage.occupy(resident)

    def attach(self) -> None:
        """Hang the hooks in and hand the optimizer its work."""
        model = self.model
        for point in self.points:
            opened = tuple(self.units[i] for i in point.units)
            hooks = PointHooks(point.module, opened, self.residency, self.backward, self.ranks.size > 1)
            self._end.callback(hooks.remove)
        self._treat_blocks()
        if self.stage.lasting:
            self.readers = readers = Readers(self.backward.read, self.owners, self.stage.device)
            for point in self.points:
                if not offloads(
                    self.ways.get(point.name, "keep")
                ):  # there, what is saved is looked at anyway
                    self._end.callback(readers.around(point.module))
        self._undo_last(self.stage.hang(model))
        if self._slices_loss:
            self._end.callback(slice_loss(model, self.activations))
        device, dtype = self.stage.device, self.precision.dtype
        before = partial(self.prelude.before, self)
        self.laps = Laps(
            model,
            device,
            dtype,
            self.clock,
            self.gauge,
            self.backward,
            self.updates,
            self.ranks,
            before,
            self.points,
        )
        self._end.callback(self.laps.remove)
        self._places = {b.parameter: (u.index, i) for u in self.units for i, b in enumerate(u.bindings)}
        for parameter, place in self._places.items():
            if parameter.requires_grad:
                self._end.callback(self._watch(parameter, place).remove)
        self._undo_last(self.misuse.hang(model))
        if self.optimizer is not None:
            vars(model)["zero_grad"] = self._zero_grad
            self._end.callback(vars(model).pop, "zero_grad", None)
            scale = LossScale() if self.precision.compute == "fp16" else None
            self.optimizer.bind(self, scale)
            self._end.callback(self.optimizer.unbind)
        claim = Claim(((b.name, b.parameter) for u in self.units for b in u.bindings), self.optimizer)
        self._end.callback(claim.end)
        if self.stage.lasting:
            self._undo_last(self.singles.stand())
        self.prelude.hung()

    def treat(self, activations: Activations) -> None:
        """Blocks, which kept their activations so far, do this with them from now on."""
        self.activations, self.ways = activations, ways_of(self.points, activations)
        self._treat_blocks()

    def _undo_last(self, undo: Iterable[Callable[[], object]]) -> None:
        for function in undo:
            self._end.callback(function)

    def _treat_blocks(self) -> None:
        rows = self.activations.microbatch
        undo = treat_blocks(self.points, self.ways, rows, self._summed, self.saver, self._computing)
        self._undo_last(undo)

    def _computing(self, numbers: Sequence[int]) -> None:
        self.backward.computing([self.units[number] for number in numbers])

    def expect(self, profile: Profile) -> None:
        """A training lap that nobody measured yet will take so much."""
        self.gauge.expect(profile)

    def foreseen(self, profile: Profile) -> None:
        """Likewise, and the first batch is known to fit."""
        self.expect(profile)
        self.prelude.known()

    def _watch(self, parameter: nn.Parameter, place: tuple[int, int]) -> Any:
        # Python's collector doesn't see hooks that a tensor holds: they must not hold what holds the tensor.
        engine = weakref.ref(self)

        def accumulated(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            found = engine()
            if found is not None and gradient is not None:  # none comes from a block that hands over sums
                found._accumulated(*place, gradient)

        return parameter.register_post_accumulate_grad_hook(accumulated)

    def _backward_over(self) -> None:
        self.saved.sweep()
        self.stage.backward_over()

    @allocating("a gradient")
    def _accumulated(self, number: int, place: int, gradient: torch.Tensor) -> None:
        self.misuse.refuse_unscaled()
        self.saved.sweep()  # what the node before this one saw is room for the gradient
        unit = self.units[number]
        binding = unit.bindings[place]
        if binding.store.run.trained:
            with self.ranks.telling("the gradients of a pass"):
                self.misuse.refuse_clipped(binding)
                self.updates.finish()  # no chunk holds gradients of two steps
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                self.stage.collect(unit, binding, self.rowless.clean(gradient.detach()))
        else:
            self.misuse.warn_dropped(binding)
        self.backward.accumulated(unit, binding.slot.index)

    def _summed(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """A parameter's gradient, summed over the slices of a backward pass."""
        self._accumulated(*self._places[parameter], gradient)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()

    # -- the optimizer's backend ------------------------------------------------------------------

    def sum_of_squares(self, transform: GradTransform) -> float:
        with self.ranks.telling("the norm of the gradients"):
            self.misuse.refuse_set()
            self.updates.preserver.report()  # before the step changes anything
            self.stage.settle_gradients()
            return self.gradients.sum_of_squares(transform)

    def first_nonfinite(self) -> str | None:
        return self.ranks.first_of(self.gradients.first_nonfinite())

    def present(self) -> set[int]:
        return self.gradients.collected | self.stage.collected()

    def apply(self, due: Due) -> None:
        with self.ranks.telling("the step"):
            self._apply(due)

    def _apply(self, due: Due) -> None:
        assert self.pipeline is not None
        self.gauge.end()
        with self.residency.changing():
            changing = frozenset(self.pipeline.begin(due))  # not what is due: some of it may be done already
            for unit in self.units:
                unit.version += not changing.isdisjoint(unit.stores)
                self.stage.stale(unit)
        if self.pool.floor < 2 * self._largest_update:
            self.pipeline.finish()  # beside the activations of a forward there would not be room for updates
        self.stage.anticipate()

    def clear(self) -> None:
        self.stage.forget_gradients()
        self.gradients.clear()

    def state(self, index: int) -> Mapping[str, torch.Tensor]:
        assert self.rule is not None
        self.updates.finish()
        for unit in self.units:
            for binding in unit.bindings:
                if binding.slot.index == index:
                    return weights_of.moments(binding, self.pool, self.rule, self.ranks)
        raise KeyError(index)

    def begin_restore(self, whole: bool) -> None:
        """All parameters (and states, if ``whole``) are about to be replaced: drop what comes from the old ones."""
        self.updates.preserver.finish()
        if whole:
            self.updates.forget()
        self.settle()
        self.clear()
        for unit in self.units:
            self._replaced(unit)

    def change(self, function: weights_of.Change) -> None:
        """Let a function change all parameters, one after the other."""
        self.misuse.refuse_changing(self.backward.running)
        self.updates.preserver.finish()
        self.take_written()
        self.settle()
        for unit in self.units:
            self._replaced(unit)
            weights_of.change(unit, function, self.pool, self.rule, self.ranks)

    def _replaced(self, unit: Unit) -> None:
        """Its values are about to be others."""
        unit.version += 1
        self.stage.replaced(unit)

    def take_written(self) -> None:
        """What was written to closed parameters of one element is their value from now on."""
        self.singles.take_all()

    def settle(self) -> None:
        """Wait for updates and copies: afterwards all chunks are as the steps so far leave them."""
        self.updates.finish()
        self.stage.synchronize()
        self.saved.sweep()

    # -- reading and the end ----------------------------------------------------------------------

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.take_written()
        self.updates.finish()
        for unit in self.units:
            yield from weights_of.masters(unit, self.pool, self.rule, self.ranks)

    def shut(self) -> None:
        """Give everything back, the last first: each part whatever the others raise. Twice is as good as once."""
        self._end.close()
