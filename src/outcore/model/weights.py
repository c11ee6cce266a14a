"""Where a model's first values come from, one unit at a time, and how they get into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import xxhash
from torch import nn

from outcore.chunks.layout import Segment
from outcore.chunks.pool import Access, Pool
from outcore.chunks.store import RunStore
from outcore.errors import ModelError, UsageError
from outcore.memory.heap import give_back
from outcore.memory.refusal import allocating
from outcore.model.unit import Binding, Unit
from outcore.model.units import UnitPlan
from outcore.optim.kernels import Rule
from outcore.parallel.ranks import Ranks, World

STRETCH = 1 << 18
"""Elements that are widened to fp32 at a time; a multiple of `outcore.chunks.layout.ALIGN`."""


Change = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Takes a parameter's name and its value in full precision, on the CPU; changes that in place, or returns another."""

Put = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor], None]
"""Sets a parameter and its states to masters, as `Rule.set_master` does, with which moments stay."""


class Source(Protocol):
    """Gives the values of a unit's parameters."""

    def beside(self, plan: UnitPlan) -> int:
        """Bytes of host memory that it takes while it gives them."""

    def values(self, plan: UnitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter of the unit with a tensor of its shape on the CPU, of any floating dtype."""

    def origin(self) -> bytes:
        """What says that whoever has the same gets the same values; empty if nothing does but the values."""


class InMemory:
    """A model that holds its weights already."""

    def origin(self) -> bytes:
        return b""

    def beside(self, plan: UnitPlan) -> int:
        return 0

    def values(self, plan: UnitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in plan.parameters:
            yield name, parameter.detach().cpu()


def agreed(source: Source, world: World) -> Source:
    """First values that all ranks have in common.

    Where all of them name the same files of one machine, each reads what it keeps and nothing else: files are mapped,
    so what isn't touched isn't read. Else values are compared.
    """
    what = "where the first values come from"
    with world.telling(what):
        own = source.origin()
    said = world.words(own, what)
    return source if own and all(word == own for word in said) else Compared(source, world)


class Compared:
    """Values that must be the same on all ranks: a digest of each unit is compared, for which all read all of it.

    Raises:
        UsageError: they differ; from `values`, on all ranks.
    """

    def __init__(self, source: Source, world: World) -> None:
        self._source = source
        self._world = world

    def origin(self) -> bytes:
        return self._source.origin()

    def beside(self, plan: UnitPlan) -> int:
        return self._source.beside(plan)

    def values(self, plan: UnitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        what = f"the first values of {plan.name}"
        digest = xxhash.xxh3_128()
        with self._world.telling(what):
            for name, values in self._source.values(plan):
                digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                yield name, values
        self._world.same(
            digest.digest(),
            what,
            "seed all ranks alike before the model is built, or load its weights from files",
        )


class Initialised:
    """A model on ``meta``: each unit is built on the CPU in fp32, and its modules initialise it themselves.

    A model with ``_init_weights`` (transformers) has that applied to each module, children first; others
    their modules' ``reset_parameters``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def origin(self) -> bytes:
        return b""

    def beside(self, plan: UnitPlan) -> int:
        return sum(4 * parameter.numel() for _, parameter in plan.parameters)

    @torch.no_grad()
    def values(self, plan: UnitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = {id(parameter): name for name, parameter in plan.parameters}
        modules = list(plan.module.modules()) if plan.whole else [plan.module]
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        real: dict[int, nn.Parameter] = {}
        lists: list[nn.Module] = [
            c for c in plan.module.children() if isinstance(c, (nn.ParameterList, nn.ParameterDict))
        ]
        for module in dict.fromkeys(modules + lists):
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in wanted:
                    places.append((module, key, parameter))
                    if id(parameter) not in real:
                        empty = torch.zeros(parameter.shape, dtype=torch.float32)
                        real[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for module, key, parameter in places:
            module._parameters[key] = real[id(parameter)]
        try:
            for module in reversed(modules):
                self._initialise(module)
        finally:
            for module, key, parameter in places:
                module._parameters[key] = parameter
        for name, parameter in plan.parameters:
            yield name, real[id(parameter)].detach()

    def _initialise(self, module: nn.Module) -> None:
        own = getattr(self._model, "_init_weights", None)
        if callable(own):
            if all(not p.is_meta for p in module.parameters()):
                own(module)
            return
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in module.parameters(recurse=False)):
            raise ModelError(
                f"the model is on 'meta' and {type(module).__name__} has no reset_parameters() to initialise "
                "it: load weights from a directory, or build the model on the CPU"
            )


@torch.no_grad()
def fill(unit: Unit, plan: UnitPlan, source: Source, pool: Pool, rule: Rule | None, spare: int) -> None:
    """Write a unit's first values: parameters, and for trained ones masters and fresh moments.

    Args:
        rule: the update rule of trained runs.
        spare: bytes of the pool that may be lent to the source.
    """
    bindings = {binding.name: binding for binding in unit.bindings}
    lent = min(source.beside(plan), spare)
    pool.borrow(lent)
    try:
        for name, values in source.values(plan):
            binding = bindings[name]
            if values.shape != binding.slot.shape:
                raise ModelError(
                    f"{name}: the weights have shape {list(values.shape)}, the model {list(binding.slot.shape)}"
                )
            write(binding, values, pool, None if rule is None else partial(_begin, rule))
    finally:
        pool.repay(lent)
    if lent:
        give_back()


@torch.no_grad()
def change(unit: Unit, function: Change, pool: Pool, rule: Rule | None, ranks: Ranks) -> None:
    """Let a function change a unit's parameters, one after the other; moments stay.

    Raises:
        UsageError: it returns something else than a tensor of the parameter's shape, or not the same on all ranks.
    """
    bindings = {binding.name: binding for binding in unit.bindings}
    for name, values in masters(unit, pool, rule, ranks):
        what = f"the change of {name}"
        with ranks.together(what):
            found = function(name, values)
            found = values if found is None else found
            if not isinstance(found, torch.Tensor) or found.shape != values.shape:
                kind = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise UsageError(f"{name} has shape {list(values.shape)} and can't be changed to {kind}")
            found = found.detach().to("cpu", values.dtype).contiguous()
        if ranks.size > 1:
            digest = xxhash.xxh3_128(found.reshape(-1).view(torch.uint8).numpy().data).digest()
            if len(set(ranks.words(digest, what))) > 1:
                raise UsageError(
                    f"{name} was changed to other values on one rank than on another: seed all alike"
                )
        with ranks.telling(what):
            write(bindings[name], found, pool, None if rule is None else rule.set_master)


def write(binding: Binding, values: torch.Tensor, pool: Pool, put: Put | None) -> None:
    """Set one parameter, and where it is trained its states by ``put``."""
    store, slot = binding.store, binding.slot
    flat = values.reshape(-1)
    for k in store.run.covering(slot):
        for segment in store.run.segments(k):
            if segment.slot is not slot:
                continue
            part, first = _ours(store, k, segment)
            piece = flat[first : first + part.stop - part.start]
            if not len(piece):
                continue
            with pool.guard((store.parameters[k], *store.states[k : k + 1]), Access.WRITE):
                if store.states and put is not None:
                    _put(store, k, part, piece, put)
                else:
                    store.parameter(k)[part].copy_(piece)


def _ours(store: RunStore, k: int, segment: Segment) -> tuple[slice, int]:
    """What of a segment is written here, and where in the parameter it begins."""
    start, stop = segment.start, segment.stop
    if store.written is not None:
        before = store.run.extent(k)[0]
        start = min(max(start, store.written.start - before), stop)
        stop = max(min(stop, store.written.stop - before), start)
    return slice(start, stop), segment.first + start - segment.start


def _put(store: RunStore, k: int, part: slice, values: torch.Tensor, put: Put) -> None:
    """Little by little: what is widened to fp32 meanwhile counts nowhere, and each rank does it at once."""
    for first in range(0, len(values), STRETCH):
        piece = values[first : first + STRETCH]
        at = slice(part.start + first, part.start + first + len(piece))
        put(store.parameter(k)[at], store.state(k, at), piece.float())


def _begin(rule: Rule, param: torch.Tensor, planes: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
    """A `Put` with which moments start anew."""
    rule.initialise(planes, param, values)


def masters(unit: Unit, pool: Pool, rule: Rule | None, ranks: Ranks) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's value in full precision: the fp32 master where there is one."""
    for binding in unit.bindings:
        what = f"the reading of {binding.name}"
        with ranks.telling(what):
            values = _read(binding.store, binding, pool, rule)
            ranks.complete(values.view(-1), partial(binding.store.run.spread, binding.slot), what)
        yield binding.name, values


@allocating("a parameter in full precision")
def _read(store: RunStore, binding: Binding, pool: Pool, rule: Rule | None) -> torch.Tensor:
    slot = binding.slot
    trained = bool(store.states) and rule is not None
    out = torch.empty(slot.numel, dtype=torch.float32 if trained else store.run.dtype)
    for k in store.run.covering(slot):
        for segment in store.run.segments(k):
            if segment.slot is not slot:
                continue
            part = slice(segment.start, segment.stop)
            piece = out[segment.first : segment.first + segment.stop - segment.start]
            with pool.guard((store.parameters[k], *store.states[k : k + 1]), Access.READ):
                if trained:
                    assert rule is not None
                    planes = store.state(k, part)
                    rule.master(store.parameter(k)[part], planes, piece)
                else:
                    piece.copy_(store.parameter(k)[part])
    return out.view(slot.shape)


@allocating("an optimizer state")
def moments(binding: Binding, pool: Pool, rule: Rule, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """A trained parameter's moments, by torch's names, in its shape."""
    store, slot = binding.store, binding.slot
    found: dict[str, torch.Tensor] = {}
    what = f"the reading of the moments of {binding.name}"
    with ranks.telling(what):
        for k in store.run.covering(slot):
            for segment in store.run.segments(k):
                if segment.slot is slot and store.states:
                    part = slice(segment.start, segment.stop)
                    at = slice(segment.first, segment.first + segment.stop - segment.start)
                    with pool.guard([store.states[k]], Access.READ):
                        for name, values in rule.moments(store.state(k, part)).items():
                            found.setdefault(name, values.new_zeros(slot.numel))[at] = values
        names = rule.moments(tuple(torch.empty(0, dtype=plane.dtype) for plane in store.planes))
        for name, like in names.items():
            whole = found.setdefault(name, like.new_zeros(slot.numel))
            ranks.complete(whole, partial(store.run.spread, slot), what)
    return {name: values.view(slot.shape) for name, values in found.items()}


def has_meta(plans: Sequence[UnitPlan]) -> bool:
    """Whether any parameter has no values yet."""
    return any(parameter.is_meta for plan in plans for _, parameter in plan.parameters)
