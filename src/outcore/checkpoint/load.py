"""Loading: a checkpoint into a model that is offloaded already, wherever its states are."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import rng, states
from outcore.checkpoint.manifest import Manifest, StoredOptimizer
from outcore.checkpoint.model import (
    end_previous,
    engine_with,
    match_buffers,
    match_optimizer,
    match_parameters,
    names_by_number,
    refuse_open,
)
from outcore.checkpoint.ranked import own_randoms
from outcore.checkpoint.reader import Reader, opened
from outcore.checkpoint.values import decode
from outcore.engine import Engine
from outcore.errors import CheckpointError, TierError
from outcore.memory.refusal import allocating
from outcore.optim.optimizer import Optimizer
from outcore.optim.scaling import LossScale


@allocating("a checkpoint")
def load(path: str | PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load a checkpoint, so that the run goes on to the bit as the one that was saved.

    The manifest, the presence, length and header of each file, and names, shapes and groups are checked
    before anything changes; the tensors' digests as they are read.

    Args:
        path: the checkpoint's own directory.
        model: offloaded, under any budget. Gradients that wait are dropped.
        optimizer: the one it was offloaded with, of the class that was saved. Without it only parameters and
            buffers are loaded, and random numbers, moments and hyperparameters stay as they are.

    Returns:
        The ``extra`` that was saved.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged, or of another optimizer.
        ModelError: it is of another model; names the parameter.
        DiskFullError, DiskWriteError: a save of the model that was under way failed; nothing was loaded.
        StateError: the model is not offloaded, or parameters are open.
        TierError: the system refused. Where the message says that the state is undefined, some tensors have
            been replaced and others not: load another checkpoint before going on.
    """
    engine = engine_with(model, optimizer)
    refuse_open(engine)
    end_previous(engine)
    what = f"the load of {Path(path).name}"
    engine.ranks.agree(what)  # ranks may share what is replaced, and nobody reads it any more
    with engine.ranks.together(what), opened(Path(path)) as reader:
        return Restore(engine, reader, engine.optimizer if optimizer is not None else None).run()


def extra_of(path: Path) -> Any:
    """The ``extra`` of a checkpoint, without a model to load it into.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        DiskReadError: the system refused.
    """
    with opened(path) as reader:
        return decode(reader.manifest.extra, lambda key: _tensor(reader, key))


class Restore:
    """One load: checks all it can, then changes the model."""

    def __init__(self, engine: Engine, reader: Reader, optimizer: Optimizer | None) -> None:
        self._engine = engine
        self._reader = reader
        self._optimizer = optimizer
        manifest = reader.manifest
        if optimizer is not None and manifest.optimizer is None:
            raise CheckpointError("the checkpoint was saved without an optimizer: load it without one too")
        self._parameters = match_parameters(engine, manifest, optimizer is not None)
        self._buffers = match_buffers(engine, manifest)
        self._ours = {theirs: name for name, (theirs, _) in self._parameters.items()}
        self._stored = None if optimizer is None else manifest.optimizer
        if optimizer is not None and self._stored is not None:
            names = {name: theirs for name, (theirs, _) in self._parameters.items()}
            match_optimizer(engine, optimizer, self._stored, names)

    def run(self) -> Any:
        """Load; returns ``extra``."""
        manifest = self._reader.manifest
        extra = decode(manifest.extra, self._tensor)
        random = None
        hyper: list[dict[str, Any]] = []
        unstreamed: dict[str, Any] = {}
        if self._stored is not None:
            random = decode(manifest.rng, self._tensor)
            rng.check(random)
            hyper = [decode(group.hyper, self._tensor) for group in self._stored.groups]
            unstreamed = decode(self._stored.unstreamed, self._tensor)
            _check_objects(hyper, unstreamed)
        try:
            with allocating("a checkpoint"):
                self._stream(manifest)
            if self._optimizer is not None and self._stored is not None:
                self._resume(self._optimizer, self._stored, hyper, unstreamed)
                rng.restore(own_randoms(random, self._engine.ranks))
        except TierError as error:
            kind = CheckpointError if isinstance(error, CheckpointError) else type(error)
            raise kind(f"{error}; the model's state is undefined until another load succeeds") from error
        return extra

    def _tensor(self, key: str) -> torch.Tensor:
        return _tensor(self._reader, key)

    @torch.no_grad()
    def _stream(self, manifest: Manifest) -> None:
        whole = self._optimizer is not None
        self._engine.begin_restore(whole)
        source = self._reader.source
        moments = {}
        if self._optimizer is not None:
            moments = {
                name: {moment: source(piece) for moment, piece in stored.moments.items()}
                for name, (_, stored) in self._parameters.items()
            }
        values = {name: source(stored.value) for name, (_, stored) in self._parameters.items()}
        states.write_slices(self._engine, values, moments, whole)
        for name, buffer in self._buffers.items():
            buffer.copy_(source(manifest.buffers[name]).whole())

    def _resume(
        self,
        optimizer: Optimizer,
        stored: StoredOptimizer,
        hyper: list[dict[str, Any]],
        unstreamed: Mapping[str, Any],
    ) -> None:
        number = {name: index for index, name in names_by_number(self._engine).items()}
        for group, values in zip(optimizer.param_groups, hyper, strict=True):
            group.update(values)
        optimizer.resume(
            {number[self._ours[name]]: steps for name, steps in stored.steps.items()},
            {number[self._ours[name]]: rest for name, rest in unstreamed.items() if name in self._ours},
            stored.skipped_steps,
        )
        if stored.scale is not None and optimizer.loss_scale is not None:
            optimizer.loss_scale = LossScale(**vars(stored.scale))


def _tensor(reader: Reader, key: str) -> torch.Tensor:
    piece = reader.manifest.state.get(key)
    if piece is None:
        raise CheckpointError(f"the manifest speaks of a tensor {key[:80]!r} that it does not have")
    return reader.source(piece).whole()


def _check_objects(hyper: list[Any], unstreamed: Any) -> None:
    rests = unstreamed.values() if isinstance(unstreamed, dict) else [None]
    for value in (*hyper, *rests):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise CheckpointError("the manifest: the optimizer's values are not objects")
