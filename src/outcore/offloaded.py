"""Offloaded models: how a model becomes one, and what can be asked of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from outcore.engine import Engine
from outcore.errors import ModelError, StateError, UsageError
from outcore.memory.budget import Budget
from outcore.memory.device import find
from outcore.memory.ledger import Snapshot
from outcore.memory.refusal import allocating
from outcore.model import weights as weights_of
from outcore.model.directory import Directory
from outcore.model.matmuls import warn_if_slow
from outcore.model.policies import Activations, Precision
from outcore.model.ranked_sites import choose, refusal
from outcore.model.shares import Shares, Split, busy_by
from outcore.optim.optimizer import Optimizer
from outcore.parallel.ranks import join
from outcore.parallel.sharding import Sharding
from outcore.planning.effective import check_fit, effective
from outcore.planning.plan import Plan

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
"""The model's hooks own the engine, so that a model that is dropped takes files and threads with it."""

_released: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
"""Models whose values are gone, and the hook that says so."""


@allocating("a model to be offloaded")
def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: Budget | None = None,
    precision: Precision | str | None = None,
    activations: Activations | str | None = None,
    device: str | torch.device | None = None,
    weights: str | Path | None = None,
    units: Sequence[str] | None = None,
    chunk_size: str | int | None = None,
    prefetch: bool = True,
    plan: Plan | None = None,
    sharding: Sharding | None = None,
) -> nn.Module:
    """Spread a model's states over device, host and disk. Works in place; names and shapes stay.

    Args:
        model: any module. Parameters on ``meta`` are initialised, or loaded from ``weights``, unit by unit.
        optimizer: one of outcore's, made from the model's parameters. Without one, parameters are streamed for
            inference.
        budget: bytes per tier. By default what the machine leaves free, and no disk.
        precision: the dtype to compute in, or its name: ``"bf16"``, with fp32 masters, by default.
        activations: whether blocks ``"keep"``, ``"recompute"`` or ``"offload"`` what backward needs. By default they
            keep it if the budgets hold that for the first batch, and recompute it otherwise, to the same bits.
        device: where to compute; by default the accelerator if there is one.
        weights: a directory of safetensors files to load from.
        units: names (or shell patterns) of modules to fetch as a whole, where the default is not right.
        chunk_size: the most bytes of parameters that move as one piece; ``"8MiB"`` by default.
        prefetch: read ahead in the recorded order.
        plan: from `outcore.plan`, and run as it says; what is named beside it may not differ.
        sharding: how states are spread where ``torch.distributed`` has several ranks; by default
            ``Sharding("parameters")``. The budget is that of each rank. All ranks call this together.

    Returns:
        The model.

    Raises:
        UsageError: a setting that can't mean anything.
        ModelError: a model or weights that don't fit together.
        BudgetError: the run can't fit; says what would.
    """
    own = _check(model, optimizer, weights)
    place = find(device)
    on_host = place.type == "cpu"
    check_fit(plan, model, own, on_host)
    run = effective(
        plan,
        budget=budget,
        precision=precision,
        activations=activations,
        units=units,
        chunk_size=chunk_size,
        prefetch=prefetch,
    )
    if own is not None:
        own.check_free()  # before anything is taken from the model
    whole = own is not None and own.rule.whole_parameters
    with ExitStack() as parting:
        ranks = join(sharding, refusal(whole, plan is not None))
        parting.callback(ranks.leave)
        warn_if_slow(run.precision.dtype, place)
        with ranks.telling("the offload of the model"), ExitStack() as undo:
            site, limits = choose(place, run.budget, run.prefetch, ranks)
            engine = Engine(model, own, limits=limits, site=site, settings=run)
            undo.callback(engine.shut)
            engine.fill(site.source(_source(engine, weights)))
            engine.attach()
            if plan is not None and plan.profile is not None:
                engine.foreseen(plan.profile)
            undo.pop_all()
        parting.pop_all()
    _engines[model] = weakref.ref(engine)
    if model in _released:
        _released.pop(model).remove()
    return model


def _source(engine: Engine, weights: str | Path | None) -> weights_of.Source:
    """Where a model's first values come from."""
    if weights is not None:
        return Directory(weights, engine.model)
    return (
        weights_of.Initialised(engine.model) if weights_of.has_meta(engine.plans) else weights_of.InMemory()
    )


def _check(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, weights: str | Path | None
) -> Optimizer | None:
    """The optimizer, which is one of outcore's.

    Raises:
        StateError, UsageError: this model, or this optimizer, can't be offloaded now.
    """
    if model in _engines:
        raise StateError("this model is offloaded already")
    if model in _released and weights is None:
        raise StateError(
            "this model was released and its parameters have no values: build it again, or give "
            "offload(..., weights=directory)"
        )
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"offload() needs one of outcore's optimizers, not {type(optimizer).__name__}: use outcore.AdamW and "
            f"the like, or outcore.Foreign(torch.optim.{type(optimizer).__name__}, model.parameters(), ...)"
        )
    engines = filter(None, (found() for found in _engines.values()))
    taken = {b.parameter for engine in engines for unit in engine.units for b in unit.bindings}
    if not taken.isdisjoint(model.parameters()):
        raise StateError("parameters of this model are offloaded already, with another model")
    _refuse_shared(model)
    return optimizer


def _refuse_shared(model: nn.Module) -> None:
    """
    Raises:
        ModelError: two parameters lie in the same memory, as tied weights in disguise.
    """
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.nbytes, name)
        for name, p in model.named_parameters()
        if not is_lazy(p)
        and p.device.type == "cpu"
        and p.layout is torch.strided
        and p.numel()
        and p.is_contiguous()
    )
    for (_, stop, first), (start, _, second) in itertools.pairwise(spans):
        if start < stop:
            raise ModelError(
                f"{first} and {second} are two parameters in the same memory, and would be one no longer: tie the "
                "parameter itself, second.weight = first.weight"
            )


def engine_of(model: nn.Module) -> Engine:
    """The engine behind an offloaded model.

    Raises:
        StateError: the model is not offloaded.
    """
    reference = _engines.get(model)
    engine = None if reference is None else reference()
    if engine is None:
        raise StateError("this model is not offloaded: call outcore.offload(model, ...) first")
    return engine


def weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter's name and full-precision value, one at a time, on the CPU.

    Trained parameters come as their fp32 master, others in the dtype they are computed in.
    """
    return engine_of(model).masters()


@allocating("a parameter to be changed")
def change(model: nn.Module, function: weights_of.Change) -> None:
    """Change parameters between two steps, one at a time, in full precision, with memory for no more than one::

        outcore.change(critic, lambda name, value: value.clamp_(-0.01, 0.01))

    Args:
        function: called with each parameter's name and value, on the CPU: the fp32 master of those that are trained,
            others in the dtype they are computed in. It changes the value in place, or returns another of that shape.
            On several ranks it is called on all of them, and must do the same.

    Moments and gradients stay. What a forward before left for its backward is refused there, as after a step. If the
    function raises, the parameters before that one are changed.

    Raises:
        StateError: the model is not offloaded, or in use.
        UsageError: the function gave something that is no such value, or not the same on all ranks.
    """
    engine_of(model).change(function)


@contextmanager
def gather(model: nn.Module) -> Iterator[None]:
    """Open all parameters for reading: inside, they have their values, in the compute dtype.

    What is computed from them has gradients (a penalty on weights), also if its backward comes later; torch.func, which
    wants no hooks for saved tensors, works inside of ``torch.no_grad()`` around this.

    Raises:
        BudgetError: the budget can't hold them all at once.
        StateError: one was changed inside; `change` is made for that.
    """
    engine = engine_of(model)
    entered = []
    try:
        for unit in engine.units:
            engine.residency.enter(unit, "read")
            entered.append(unit)
        with nullcontext() if engine.readers is None else engine.readers.here():
            yield
    finally:
        engine.residency.leave(*entered)


def shares(model: nn.Module, split: Split = "even") -> Shares:
    """Divides batches among the ranks that train a model; all ranks call this together::

        shares = outcore.shares(model, "speed")
        for batch in loader:  # the same batch on all ranks
            with shares.part(batch) as part:
                loss = model(**part.batch).loss  # the mean over this rank's rows
                optimizer.backward(part.weigh(loss))
            optimizer.step()
            optimizer.zero_grad()

    Args:
        split: ``"even"``, or ``"speed"``: in proportion to what each rank does in a second, measured as it trains. The
            result is that of the whole batch either way, up to the order of sums.

    Raises:
        StateError: the model is not offloaded.
        UsageError: an unknown split.
    """
    engine = engine_of(model)
    return Shares(engine.ranks, split, busy_by(engine.ledger), engine.rowless)


def snapshot(model: nn.Module) -> Snapshot:
    """What each tier holds, what each link moved and where time went, since `offload`."""
    return engine_of(model).ledger.snapshot()


def release(model: nn.Module) -> None:
    """Close files and threads and give all memory back. A save under way is committed first.

    The model's parameters have no values afterwards: calling it raises `StateError`, and only `offload` with
    ``weights`` brings it back.
    """
    reference = _engines.pop(model, None)
    engine = None if reference is None else reference()
    if engine is not None:
        with ExitStack() as end:
            end.callback(_mark_released, model)
            end.callback(engine.ranks.leave)
            end.callback(engine.shut)
            engine.updates.preserver.finish()
        engine.updates.preserver.report()


def _mark_released(model: nn.Module) -> None:
    _released[model] = model.register_forward_pre_hook(_refuse_released)


def _refuse_released(module: nn.Module, args: Any) -> None:
    raise StateError("this model was released and its parameters have no values: build or load it again")
