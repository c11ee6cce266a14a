"""What a model and its optimizer are called in a checkpoint, and whether the two fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from outcore.checkpoint.manifest import Manifest, StoredOptimizer, StoredParameter
from outcore.checkpoint.pieces import dtype_name
from outcore.checkpoint.states import bindings, moment_names
from outcore.engine import Engine
from outcore.errors import CheckpointError, ModelError, StateError, UsageError
from outcore.offloaded import engine_of
from outcore.optim.foreign import Foreign
from outcore.optim.optimizer import Optimizer


def engine_with(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Engine:
    """The engine of a model and the optimizer that it was offloaded with; all values are as the user left them.

    Raises:
        StateError: the model is not offloaded.
        UsageError: the optimizer is not the one it was offloaded with.
    """
    engine = engine_of(model)
    if optimizer is not None and optimizer is not engine.optimizer:
        raise UsageError("the optimizer is not the one that the model was offloaded with")
    engine.take_written()
    return engine


def refuse_open(engine: Engine) -> None:
    """Check that no parameter is open.

    Raises:
        StateError: one is.
    """
    engine.laps.abandon()
    if any(unit.opened for unit in engine.units):
        raise StateError("a checkpoint can't be loaded while parameters are open: leave outcore.gather first")


def refuse_ranks(engine: Engine, what: str) -> None:
    """Check that one process keeps all of the model.

    Raises:
        UsageError: several ranks do.
    """
    if engine.ranks.size > 1:
        raise UsageError(
            f"{what} is not possible with several ranks: outcore.save, and do it from the checkpoint"
        )


def end_previous(engine: Engine) -> None:
    """Wait for the save of a model that is under way, if there is one.

    Raises:
        OutcoreError: what went wrong with it, if nobody was told yet.
    """
    engine.updates.preserver.finish()
    engine.updates.preserver.report()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to a model's state."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def kind_of(optimizer: Optimizer) -> str:
    """The name of an optimizer's class; for a foreign one that of the class it runs."""
    if isinstance(optimizer, Foreign):
        return f"Foreign {optimizer.kind.__module__}.{optimizer.kind.__qualname__}"
    return type(optimizer).__name__


def names_by_number(engine: Engine) -> dict[int, str]:
    """The names of parameters by the optimizer's numbers."""
    return {binding.slot.index: binding.name for binding in bindings(engine)}


def match_parameters(
    engine: Engine, manifest: Manifest, with_optimizer: bool
) -> dict[str, tuple[str, StoredParameter]]:
    """For each of the model's parameters, by name: its name in the checkpoint, and what is there.

    Tied parameters are found under any of their names.

    Raises:
        ModelError: a parameter is missing on either side, or has another shape.
        CheckpointError: one is trained on one side only, or has other moments.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    found = {}
    for binding in bindings(engine):
        names = (binding.name, *aliases.get(id(binding.parameter), []))
        theirs = next((name for name in names if name in manifest.parameters), None)
        if theirs is None:
            raise ModelError(f"the checkpoint has no parameter {binding.name}: it is of another model")
        stored = manifest.parameters[theirs]
        if stored.value.shape != tuple(binding.slot.shape):
            raise ModelError(
                f"{binding.name}: the checkpoint has shape {list(stored.value.shape)}, "
                f"the model {list(binding.slot.shape)}"
            )
        if not stored.value.dtype.is_floating_point and binding.store.run.dtype.is_floating_point:
            raise ModelError(
                f"{binding.name}: the checkpoint has {dtype_name(stored.value.dtype)}, not a floating dtype"
            )
        if with_optimizer:
            _match_training(binding.name, binding.store.run.trained, moment_names(engine, binding), stored)
        found[binding.name] = (theirs, stored)
    left = manifest.parameters.keys() - {theirs for theirs, _ in found.values()}
    if left:
        raise ModelError(
            f"the model has no parameter {min(left)[:200]!r}: the checkpoint is of another model"
        )
    return found


def _match_training(name: str, trained: bool, moments: tuple[str, ...], stored: StoredParameter) -> None:
    if trained != stored.trained:
        here, there = ("trained", "frozen") if trained else ("frozen", "trained")
        raise CheckpointError(f"{name} is {here} in the model and {there} in the checkpoint")
    if set(moments) != set(stored.moments):
        raise CheckpointError(
            f"{name} has the moments {sorted(moments)} in the model and {sorted(stored.moments)} in the checkpoint"
        )
    for moment, piece in stored.moments.items():
        if piece.dtype is not torch.float32:
            raise CheckpointError(f"{name}: the moment {moment} is not stored in fp32")


def match_buffers(engine: Engine, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The model's buffers, each of which the checkpoint has.

    Raises:
        ModelError: a buffer is missing on either side, or has another shape or dtype.
    """
    found = dict(persistent_buffers(engine.model))
    for name, buffer in found.items():
        stored = manifest.buffers.get(name)
        if stored is None:
            raise ModelError(f"the checkpoint has no buffer {name}: it is of another model")
        if stored.shape != tuple(buffer.shape) or stored.dtype is not buffer.dtype:
            raise ModelError(
                f"{name}: the checkpoint has a buffer of {stored.dtype} and shape {list(stored.shape)}, "
                f"the model of {buffer.dtype} and shape {list(buffer.shape)}"
            )
    left = manifest.buffers.keys() - found.keys()
    if left:
        raise ModelError(f"the model has no buffer {min(left)[:200]!r}: the checkpoint is of another model")
    return found


def match_optimizer(
    engine: Engine, optimizer: Optimizer, stored: StoredOptimizer, theirs: Mapping[str, str]
) -> None:
    """Check that the stored optimizer is of the same class and has the same groups.

    Args:
        theirs: the model's parameter names to those in the checkpoint.

    Raises:
        CheckpointError: it is another.
    """
    if stored.kind != kind_of(optimizer):
        raise CheckpointError(f"the checkpoint is of {stored.kind}, the optimizer is {kind_of(optimizer)}")
    names = names_by_number(engine)
    number = 0
    groups = []
    for group in optimizer.param_groups:
        count = len(group["params"])
        groups.append(tuple(theirs[names[i]] for i in range(number, number + count)))
        number += count
    if groups != [group.parameters for group in stored.groups]:
        raise CheckpointError(
            f"the optimizer's {len(groups)} parameter groups are not the checkpoint's {len(stored.groups)}: "
            "the same parameters must be in the same order"
        )
