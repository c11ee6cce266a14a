"""Saving: everything a run needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import rng, states
from outcore.checkpoint.flow import Flow
from outcore.checkpoint.manifest import (
    Manifest,
    StoredGroup,
    StoredOptimizer,
    StoredParameter,
    StoredScale,
)
from outcore.checkpoint.model import end_previous, engine_with, kind_of, names_by_number, persistent_buffers
from outcore.checkpoint.pieces import Layout, Piece
from outcore.checkpoint.ranked import Found, everyones_randoms, merged, write_own
from outcore.checkpoint.saving import Job, Saving
from outcore.checkpoint.values import Put, encode
from outcore.checkpoint.writer import Cursor, Writer, committed
from outcore.engine import Engine
from outcore.errors import StateError
from outcore.memory.refusal import allocating
from outcore.optim.foreign import Foreign
from outcore.optim.optimizer import Optimizer


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    wait: bool = True,
) -> Saving:
    """Save an offloaded model, between two steps.

    The checkpoint holds parameters (in full precision), buffers, moments, step counts, hyperparameters, the
    loss scale, random number states and ``extra``, and nothing of where they were: it loads under any budget,
    tier split, chunk size and precision. It is written beside ``path`` and appears there whole or not
    at all. Chunks are streamed: staging takes at most 2 MiB with Adam, and no more for a larger model.

    Args:
        path: the checkpoint's own directory, e.g. ``runs/a/step-100``. Missing parents are made.
        model: offloaded.
        optimizer: the one it was offloaded with. Without it the parameters and buffers alone are kept.
        extra: what else the run needs (a scheduler's ``state_dict()``, the position in the data): numbers,
            strings, booleans, ``None``, tensors, and lists, tuples and dicts of these.
        wait: until it is committed. Otherwise the large part is written by a thread while training goes on, and
            the checkpoint is of this moment all the same. A save of the model that is under way is waited for first.
            Several ranks save together, each calling this, and always wait; each writes what it keeps, and the
            first one's buffers and ``extra``.

    Returns:
        The save: ``saving.wait()`` waits until it is committed, ``saving.done`` says whether it is.

    Raises:
        UsageError: ``path`` exists already, or ``extra`` holds something else.
        StateError: the model is not offloaded, or gradients wait for a step.
        DiskFullError, DiskWriteError: the system refused; there is nothing at ``path``, and training can go on.
            What goes wrong while training goes on is raised by the next step, save or ``release`` of the model, or by
            ``saving.wait()``; so this may speak of the save before.
    """
    return begin(path, model, optimizer, extra, wait).go(wait)


@allocating("a checkpoint")
def begin(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    wait: bool,
    after: Callable[[], None] = lambda: None,
) -> Saving:
    """Write what is small and note the rest; ``after`` is called once the checkpoint is committed."""
    engine = engine_with(model, optimizer)
    if engine.ranks.size > 1:
        return _begin_together(Path(path).absolute(), engine, optimizer, extra, after)
    held = _check(engine, optimizer)
    if wait or isinstance(
        held, Foreign
    ):  # what a foreign class keeps beside moments is known after its updates
        engine.updates.finish()
    opened = _open(Path(path).absolute(), engine, held, extra, rng.capture())
    flow = Flow(engine, opened.values, opened.moments, engine.updates.pending())
    return Saving(opened.target, Job(engine, flow, opened.writer, opened.manifest, opened.folder, after))


def _begin_together(
    target: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    after: Callable[[], None],
) -> Saving:
    """Save what several ranks keep: all of it, before this returns. How: `outcore.checkpoint.ranked`."""
    ranks, what = engine.ranks, f"the save of {target.name}"
    opened: Opened | None = None
    made: list[str] = []
    with ExitStack() as stack:
        with ranks.together(what):
            held = _check(engine, optimizer)
            engine.updates.finish()
        randoms = everyones_randoms(ranks, what)
        with ranks.together(what):
            if ranks.number == 0:
                opened = _open(target, engine, held, extra, randoms)
                stack.enter_context(opened.folder)
                made = opened.writer.begin(opened.manifest.own_pieces())
        named = ranks.words(b"" if opened is None else os.fsencode(opened.place), what)
        found: Found = {}
        with ranks.together(what):
            layout = Layout()
            parameters = _plan_parameters(engine, layout, held is not None)
            layout.seal()
            found = write_own(engine, Path(os.fsdecode(named[0])), parameters, made)
        everyones = [json.loads(said) for said in ranks.words(json.dumps(found).encode(), what)]
        with ranks.together(what):
            if opened is not None:
                for piece in opened.manifest.own_pieces():
                    if piece.nbytes:
                        piece.stretches = merged(piece, everyones)
                opened.writer.finish(opened.manifest)
                stack.pop_all().close()
                after()
    return Saving(target, None)


def _check(engine: Engine, optimizer: torch.optim.Optimizer | None) -> Optimizer | None:
    """The optimizer that is saved too, once everything is at rest."""
    end_previous(engine)
    engine.laps.abandon()
    engine.stage.synchronize()
    if engine.present():
        raise StateError("a checkpoint is saved between steps, and gradients are waiting: step() first")
    return engine.optimizer if optimizer is not None else None


@dataclass(frozen=True)
class Opened:
    """A checkpoint of which all that is small is written.

    Attributes:
        place: the folder that is written to.
        folder: closing it commits, leaving it with an error removes what was written.
        values: where each parameter goes, by name.
        moments: where its moments go.
    """

    target: Path
    place: Path
    folder: ExitStack
    writer: Writer
    manifest: Manifest
    values: Mapping[str, Cursor]
    moments: Mapping[str, Mapping[str, Cursor]]


def _open(target: Path, engine: Engine, held: Optimizer | None, extra: Any, randoms: Any) -> Opened:
    model = engine.model
    layout = Layout()
    kept: dict[str, torch.Tensor] = {}
    state: dict[str, Piece] = {}

    def put(tensor: torch.Tensor) -> str:
        key = f"state.{len(kept)}"
        value = tensor.detach().to("cpu").contiguous()
        state[key] = layout.add("state", key, value.dtype, value.shape)
        kept[key] = value
        return key

    parameters = _plan_parameters(engine, layout, held is not None)
    buffers = {
        name: layout.add("buffers", name, buffer.dtype, buffer.shape)
        for name, buffer in persistent_buffers(model)
    }
    stored = None if held is None else _optimizer(engine, held, put)
    random = encode(randoms, put, "the random number states")
    more = encode(extra, put, "extra")
    planned = layout.seal()
    with ExitStack() as stack:
        files, folder = stack.enter_context(committed(target))
        writer = Writer(files, folder, planned)
        stack.callback(writer.close)
        for name, buffer in persistent_buffers(model):
            _write(writer, buffers[name], buffer.detach().to("cpu").contiguous())
        for key, value in kept.items():
            _write(writer, state[key], value)
        values = {name: writer.cursor(p.value) for name, p in parameters.items()}
        moments = {
            name: {moment: writer.cursor(piece) for moment, piece in p.moments.items()}
            for name, p in parameters.items()
        }
        manifest = Manifest(writer.stored(), parameters, buffers, state, stored, random, more)
        return Opened(target, folder, stack.pop_all(), writer, manifest, values, moments)


def _write(writer: Writer, piece: Piece, tensor: torch.Tensor) -> None:
    if piece.nbytes:
        writer.cursor(piece).write(tensor)


def _plan_parameters(engine: Engine, layout: Layout, with_moments: bool) -> Mapping[str, StoredParameter]:
    found = {}
    for binding in states.bindings(engine):
        name, shape = binding.name, binding.slot.shape
        value = layout.add("parameters", name, states.full_dtype(binding), shape)
        moments = {}
        if with_moments:
            for moment in states.moment_names(engine, binding):
                moments[moment] = layout.add("moments", f"{moment}:{name}", torch.float32, shape)
        found[name] = StoredParameter(value, binding.store.run.trained, moments)
    return found


def _optimizer(engine: Engine, optimizer: Optimizer, put: Put) -> StoredOptimizer:
    names = names_by_number(engine)
    groups, number = [], 0
    for index, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        hyper = {key: value for key, value in group.items() if key != "params"}
        members = tuple(names[i] for i in range(number, number + count))
        groups.append(StoredGroup(members, encode({**hyper}, put, f"parameter group {index}")))
        number += count
    scale = optimizer.loss_scale
    return StoredOptimizer(
        kind_of(optimizer),
        tuple(groups),
        {names[i]: steps for i, steps in sorted(optimizer.steps.items())},
        optimizer.skipped_steps,
        None
        if scale is None
        else StoredScale(scale.value, scale.growth, scale.backoff, scale.interval, scale.good_steps),
        {
            names[i]: encode(dict(rest), put, f"the state that {kind_of(optimizer)} keeps of {names[i]}")
            for i, rest in sorted(optimizer.unstreamed().items())
        },
    )
