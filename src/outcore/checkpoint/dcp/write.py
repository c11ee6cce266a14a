"""A checkpoint as a directory that plain `torch.distributed.checkpoint.load` reads."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.files import writing
from outcore.checkpoint.manifest import Manifest, StoredOptimizer
from outcore.checkpoint.pieces import Piece
from outcore.checkpoint.reader import Reader, Source, opened
from outcore.checkpoint.values import decode
from outcore.checkpoint.writer import committed
from outcore.errors import CheckpointError, ModelError, UsageError
from outcore.memory.refusal import allocating

PART = 64 << 20
"""A tensor is written in parts of whole rows, each of at most so many bytes (or one row)."""

_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}


@allocating("a checkpoint")
def to_dcp(
    checkpoint: str | PathLike[str],
    path: str | PathLike[str],
    model: nn.Module | None = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> None:
    """Write a checkpoint in the format of `torch.distributed.checkpoint`.

    Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`: a dictionary of the model's and the
    optimizer's state goes through `torch.distributed.checkpoint.load` and `set_state_dict`. Trained parameters are
    their fp32 masters. Streamed: at most `PART` bytes, or one row, are in memory at a time.

    Args:
        checkpoint: one that `outcore.save` wrote.
        path: must not exist.
        model: of the checkpoint, if it has tied parameters: they are written under each of their names. It may be on
            ``meta``.
        model_key: where the model's state goes in the saved dictionary.
        optimizer_key: where the optimizer's state goes.

    Raises:
        UsageError: ``path`` exists, or the checkpoint is of a `Foreign` optimizer.
        ModelError: the model is another.
        CheckpointError, DiskReadError: the checkpoint can't be read, or is damaged; there is nothing at ``path``.
        DiskFullError, DiskWriteError: the system refused; there is nothing at ``path``.
    """
    from outcore.checkpoint.dcp.planner import saved

    with opened(Path(checkpoint)) as reader:
        manifest = reader.manifest
        names = _names(manifest, model)
        tensors = {f"{model_key}.{alias}": manifest.parameters[name].value for alias, name in names.items()}
        tensors.update({f"{model_key}.{name}": piece for name, piece in manifest.buffers.items()})
        state: dict[str, Any] = {
            model_key: {key: _meta(manifest.parameters[n].value) for key, n in names.items()}
        }
        state[model_key].update({name: _meta(piece) for name, piece in manifest.buffers.items()})
        if manifest.optimizer is not None:
            first = {name: alias for alias, name in reversed(names.items())}
            state[optimizer_key] = _optimizer(reader, manifest, manifest.optimizer, first)
            for name, stored in manifest.parameters.items():
                for moment, piece in stored.moments.items():
                    tensors[f"{optimizer_key}.state.{first[name]}.{moment}"] = piece
        with committed(Path(path).absolute()) as (files, folder), writing(folder):
            saved(state, folder, {key: _Rows(reader.source(piece), piece) for key, piece in tensors.items()})
            files.sync_directory(folder)


class _Rows:
    """Rows of a tensor, in order."""

    def __init__(self, source: Source, piece: Piece) -> None:
        self._source = source
        self._piece = piece
        self._at = 0

    def read(self, start: int, shape: torch.Size) -> torch.Tensor:
        """The rows from ``start`` on, in their shape."""
        assert start == self._at, "rows are written in order"
        self._at += shape[0] if shape else 1
        if not shape.numel():
            return torch.empty(shape, dtype=self._piece.dtype)
        return self._source.read(shape.numel()).view(shape)


def _meta(piece: Piece) -> torch.Tensor:
    return torch.empty(piece.shape, dtype=piece.dtype, device="meta")


def _names(manifest: Manifest, model: nn.Module | None) -> dict[str, str]:
    """Each name that is written, in the model's order, to the parameter's name in the checkpoint."""
    if model is None:
        return {name: name for name in manifest.parameters}
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    found = {}
    for names in aliases.values():
        theirs = next((name for name in names if name in manifest.parameters), None)
        if theirs is None:
            raise ModelError(f"the checkpoint has no parameter {names[0]}: it is of another model")
        found.update(dict.fromkeys(names, theirs))
    left = manifest.parameters.keys() - set(found.values())
    if left:
        raise ModelError(
            f"the model has no parameter {min(left)[:200]!r}: the checkpoint is of another model"
        )
    return found


def _optimizer(
    reader: Reader, manifest: Manifest, stored: StoredOptimizer, first: dict[str, str]
) -> dict[str, Any]:
    if stored.kind.startswith("Foreign"):
        raise UsageError(f"the states of {stored.kind} can't be written for torch.distributed.checkpoint")

    def tensor(key: str) -> torch.Tensor:
        piece = manifest.state.get(key)
        if piece is None:
            raise CheckpointError(f"the manifest speaks of a tensor {key[:80]!r} that it does not have")
        return reader.source(piece).whole()

    states = {
        first[name]: {
            "step": torch.tensor(float(stored.steps.get(name, 0))),
            **{moment: _meta(piece) for moment, piece in parameter.moments.items()},
        }
        for name, parameter in manifest.parameters.items()
        if parameter.trained
    }
    groups = [
        {
            **_defaults(stored.kind),
            **decode(group.hyper, tensor),
            "params": [first[n] for n in group.parameters],
        }
        for group in stored.groups
    ]
    return {"state": states, "param_groups": groups}


def _defaults(kind: str) -> dict[str, Any]:
    """What torch's optimizer of that name keeps in a group and outcore's does not: loading asks for each of it."""
    if kind not in _TORCH:
        return {}
    [group] = _TORCH[kind]([nn.Parameter(torch.zeros(1))]).param_groups
    return {key: value for key, value in group.items() if key != "params"}
