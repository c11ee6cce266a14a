"""Export to the layout of Hugging Face: what ``from_pretrained`` loads without outcore."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import states
from outcore.checkpoint.files import Files, writing
from outcore.checkpoint.manifest import StoredParameter
from outcore.checkpoint.model import engine_with, persistent_buffers, refuse_ranks
from outcore.checkpoint.pieces import Layout, Piece
from outcore.checkpoint.reader import opened, parts
from outcore.checkpoint.writer import Cursor, Writer, committed
from outcore.errors import ModelError
from outcore.memory.refusal import allocating
from outcore.model.policies import Precision, PrecisionName

SHARD_BYTES = 4 * 10**9
"""A shard takes no further tensor once it is this large."""


@allocating("an export")
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
    refuse_ranks(engine, "export")
    engine.settle()
    layout = Layout(SHARD_BYTES, {"format": "pt"})
    names = _names(model)
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

    def fill(writer: Writer) -> None:
        sinks = {name: _Rounding(writer.cursor(piece), piece) for name, piece in parameters.items()}
        states.read(engine, sinks, {})
        for name, buffer in persistent_buffers(model):
            if buffers[name].nbytes:
                writer.cursor(buffers[name]).write(buffer.detach().to("cpu").contiguous())

    pieces = [*parameters.values(), *buffers.values()]
    _write(Path(path), layout, pieces, fill, lambda folder: _save_configs(model, target, folder))


@allocating("an export")
def export_stored(
    checkpoint: Path,
    path: Path,
    model: nn.Module,
    dtype: PrecisionName = "bf16",
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint as such a directory, without memory for more than a part of a tensor.

    Args:
        checkpoint: one, not a series.
        path: must not exist.
        model: of the checkpoint; only its names, buffers' names and configuration are used, so it may be on meta.
        dtype: of floating parameters.
        texts: more files by name, such as a tokenizer's.

    Raises:
        UsageError: an unknown dtype, or ``path`` exists.
        ModelError: the checkpoint is of another model.
        CheckpointError, DiskReadError: it can't be read, or is damaged; there is nothing at ``path``.
        DiskFullError, DiskWriteError: the system refused; there is nothing at ``path``.
    """
    target = Precision(dtype).dtype
    names = _names(model)
    with opened(checkpoint) as reader:
        manifest = reader.manifest
        _match(manifest.parameters, names, model)
        layout = Layout(SHARD_BYTES, {"format": "pt"})
        pairs = []
        for name, stored in manifest.parameters.items():
            source = stored.value
            pairs.append(
                (source, layout.add("model", names[name], _rounded(source.dtype, target), source.shape))
            )
        for name, source in manifest.buffers.items():
            pairs.append((source, layout.add("model", name, source.dtype, source.shape)))

        def fill(writer: Writer) -> None:
            for source, piece in pairs:
                if piece.nbytes:
                    sink = _Rounding(writer.cursor(piece), piece)
                    for part in parts(reader, source):
                        sink.write(part)
                    writer.settle()

        def others(folder: Path) -> None:
            _save_configs(model, target, folder)
            for name, text in (texts or {}).items():
                (folder / name).write_text(text, encoding="utf-8")

        _write(path, layout, [piece for _, piece in pairs], fill, others)


def _write(
    path: Path,
    layout: Layout,
    pieces: list[Piece],
    fill: Callable[[Writer], None],
    others: Callable[[Path], None],
) -> None:
    """Commit a directory of shards, their index, and what ``others`` writes."""
    planned = layout.seal()
    for number, file in enumerate(planned, 1):
        single = len(planned) == 1
        file.rename(
            "model.safetensors" if single else f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        )
    with committed(path.absolute()) as (files, folder):
        writer = Writer(files, folder, planned)
        try:
            fill(writer)
            with writing(folder):
                others(folder)
                _sync(files, folder)
            if len(planned) > 1:
                writer.finish_with("model.safetensors.index.json", _index(pieces))
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


def _names(model: nn.Module) -> dict[str, str]:
    """For each of a model's parameter names, the one it is stored under: of tied ones, that others are tied to."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    tied = getattr(model, "_tied_weights_keys", None) or ()
    found = {}
    for names in aliases.values():
        sources = [n for n in names if not any(pattern == n or re.search(pattern, n) for pattern in tied)]
        found.update(dict.fromkeys(names, (sources or names)[0]))
    return found


def _match(stored: Mapping[str, StoredParameter], names: Mapping[str, str], model: nn.Module) -> None:
    """Check that a checkpoint has each of a model's parameters, under any of its names, and no others."""
    unknown = stored.keys() - names.keys()
    if unknown:
        raise ModelError(
            f"the model has no parameter {min(unknown)[:200]!r}: the checkpoint is of another model"
        )
    missing = set(names.values()) - {names[name] for name in stored}
    if missing:
        raise ModelError(f"the checkpoint has no parameter {min(missing)!r}: it is of another model")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stored and stored[name].value.shape != tuple(parameter.shape):
            raise ModelError(
                f"{name}: the checkpoint has shape {list(stored[name].value.shape)}, the model {list(parameter.shape)}"
            )


def _index(pieces: list[Piece]) -> bytes:
    total = sum(piece.nbytes for piece in pieces)
    places = {piece.key: piece.file for piece in pieces}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2).encode()


def _save_configs(model: nn.Module, dtype: torch.dtype, folder: Path) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _sync(files: Files, folder: Path) -> None:
    for place in folder.iterdir():
        if place.suffix != ".safetensors":
            fd = files.open(place)
            try:
                files.sync(fd)
            finally:
                files.close(fd)
