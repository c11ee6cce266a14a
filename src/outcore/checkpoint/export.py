"""Export to the layout of Hugging Face: what ``from_pretrained`` loads without outcore."""

from __future__ import annotations

import copy
import json
import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import states
from outcore.checkpoint.files import Files, writing
from outcore.checkpoint.model import engine_with, persistent_buffers
from outcore.checkpoint.pieces import Layout, Piece
from outcore.checkpoint.writer import Cursor, Writer, committed
from outcore.engine import Engine
from outcore.model.policies import Precision, PrecisionName

SHARD_BYTES = 4 * 10**9
"""A shard takes no further tensor once it is this large."""


def export(model: nn.Module, path: str | PathLike[str], dtype: PrecisionName = "bf16") -> None:
    """Write an offloaded model as a directory that ``from_pretrained`` loads.

    Parameters are rounded once, from full precision, and streamed chunk by chunk; tied ones are
    stored once. ``config.json`` and ``generation_config.json`` are written where the model has them. The directory
    appears whole or not at all.

    Args:
        model: offloaded.
        path: must not exist. Missing parents are made.
        dtype: of floating parameters. Buffers keep theirs.

    Raises:
        UsageError: an unknown dtype, or ``path`` exists.
        StateError: the model is not offloaded.
        DiskFullError, DiskWriteError: the system refused; there is nothing at ``path``.
    """
    target = Precision(dtype).dtype
    engine = engine_with(model, None)
    engine.settle()
    layout = Layout(SHARD_BYTES, {"format": "pt"})
    names = _names(engine)
    parameters = {
        binding.name: layout.add(
            "model", names[binding.name], _rounded(states.full_dtype(binding), target), binding.slot.shape
        )
        for binding in states.bindings(engine)
    }
    buffers = {
        name: layout.add("model", name, buffer.dtype, buffer.shape)
        for name, buffer in persistent_buffers(model)
    }
    planned = layout.seal()
    for number, file in enumerate(planned, 1):
        single = len(planned) == 1
        file.rename(
            "model.safetensors" if single else f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        )
    with committed(Path(path).absolute()) as (files, folder):
        writer = Writer(files, folder, planned)
        try:
            sinks = {name: _Rounding(writer.cursor(piece), piece) for name, piece in parameters.items()}
            states.read(engine, sinks, {})
            for name, buffer in persistent_buffers(model):
                if buffers[name].nbytes:
                    writer.cursor(buffers[name]).write(buffer.detach().to("cpu").contiguous())
            _write_configs(model, target, files, folder)
            if len(planned) > 1:
                writer.finish_with(
                    "model.safetensors.index.json", _index([*parameters.values(), *buffers.values()])
                )
            else:
                writer.finish_empty()
        finally:
            writer.close()


class _Rounding:
    """A sink that rounds to its tensor's dtype."""

    def __init__(self, cursor: Cursor, piece: Piece) -> None:
        self._cursor = cursor
        self._dtype = piece.dtype

    def write(self, values: torch.Tensor) -> None:
        self._cursor.write(values.to(self._dtype))


def _rounded(dtype: torch.dtype, target: torch.dtype) -> torch.dtype:
    return target if dtype.is_floating_point else dtype


def _names(engine: Engine) -> dict[str, str]:
    """The name under which each parameter is stored: of a tied one's, the one that others are tied to."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    tied = getattr(engine.model, "_tied_weights_keys", None) or ()
    found = {}
    for binding in states.bindings(engine):
        names = aliases[id(binding.parameter)]
        sources = [n for n in names if not any(pattern == n or re.search(pattern, n) for pattern in tied)]
        found[binding.name] = (sources or names)[0]
    return found


def _index(pieces: list[Piece]) -> bytes:
    total = sum(piece.nbytes for piece in pieces)
    places = {piece.key: piece.file for piece in pieces}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()


def _write_configs(model: nn.Module, dtype: torch.dtype, files: Files, folder: Path) -> None:
    written = []
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        written.append(config)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        written.append(generation)
    with writing(folder):
        for settings in written:
            settings.save_pretrained(folder)
        for place in folder.glob("*.json"):
            fd = files.open(place)
            try:
                files.sync(fd)
            finally:
                files.close(fd)
