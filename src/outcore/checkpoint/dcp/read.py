"""A directory of torch.distributed.checkpoint into a model that is offloaded already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import files as seam
from outcore.checkpoint import states
from outcore.checkpoint.dcp.blobs import Archive, Stream
from outcore.checkpoint.dcp.data import LIMIT
from outcore.checkpoint.dcp.metadata import NAME, Content, Stored, parse
from outcore.checkpoint.descriptors import Readable
from outcore.checkpoint.files import Files
from outcore.checkpoint.model import end_previous, engine_with, persistent_buffers, refuse_open, refuse_ranks
from outcore.engine import Engine
from outcore.errors import CheckpointError, ModelError, TierError, UsageError
from outcore.memory.refusal import allocating
from outcore.optim.foreign import Foreign
from outcore.optim.optimizer import Optimizer


@allocating("a checkpoint")
def from_dcp(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    model_key: str = "model",
    optimizer_key: str = "optim",
) -> None:
    """Load what `torch.distributed.checkpoint` saved, from any number of ranks, under any budget.

    Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`. Nothing that the directory holds is
    run. Tensors that were cut along their first dimension are streamed; others take memory for one at a time. Random
    numbers and the loss scale stay as they are.

    Args:
        path: the directory with ``.metadata``.
        model: offloaded. Gradients that wait are dropped.
        optimizer: the one it was offloaded with; not a `Foreign` one. Without it parameters and buffers alone are read.
        model_key: where in the saved dictionary the model's state is; empty if it is the whole.
        optimizer_key: where the optimizer's is.

    Raises:
        CheckpointError: the directory is incomplete, damaged, or holds something else than such data.
        ModelError: it is of another model; names the parameter.
        UsageError: the optimizer is `Foreign`.
        StateError: the model is not offloaded, or parameters are open.
        TierError: the system refused. Where the message says that the state is undefined, load something else.
    """
    if isinstance(optimizer, Foreign):
        raise UsageError("the states of a Foreign optimizer can't be read from torch.distributed.checkpoint")
    engine = engine_with(model, optimizer)
    refuse_open(engine)
    refuse_ranks(engine, "from_dcp")
    with _opened(Path(path)) as directory:
        load = _Load(engine, directory, engine.optimizer if optimizer is not None else None)
        load.match(model_key, optimizer_key)
        try:
            load.run()
        except TierError as error:
            raise type(error)(
                f"{error}; the model's state is undefined until another load succeeds"
            ) from error


class Directory:
    """The checked metadata, and the files."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = Readable(files)
        self._path = path
        try:
            self.content: Content = parse(self._metadata())
        except BaseException:
            self.close()
            raise

    def _metadata(self) -> bytes:
        place = self._path / NAME
        size = self._files.size(place)
        if size > LIMIT:
            raise CheckpointError(f"{place} has {size:,} bytes, and may have {LIMIT:,}")
        found = bytearray(size)
        self._files.read(place, memoryview(found), 0)
        return bytes(found)

    def _archive(self, blob: Any) -> Archive:
        return Archive(self._files, self._path / blob.file, blob)

    def plain(self, name: str) -> Any:
        """An object that is no tensor."""
        return self._archive(self.content.objects[name]).plain()

    def source(self, stored: Stored) -> Stream | Whole:
        """A tensor's elements in order."""
        parts = [(box, self._archive(box.blob).storage(stored, box)) for box in stored.boxes]
        rest = stored.shape[1:]
        if all(box.sizes[1:] == rest for box in stored.boxes):  # rows, and sorted
            at = 0
            for box, _ in parts:
                if box.elements and box.offsets[:1] != ((at,) if stored.shape else ()):
                    raise CheckpointError(f"the parts of {stored.name[:80]!r} overlap")
                at += box.sizes[0] if box.sizes else 0
            return Stream(self._files, stored.dtype, [storage for _, storage in parts])
        streams = [(box, Stream(self._files, stored.dtype, [storage])) for box, storage in parts]
        return Whole(stored, streams)

    def close(self) -> None:
        self._files.close()


class Whole:
    """A tensor that was cut across its rows: put together when its first element is read."""

    def __init__(self, stored: Stored, streams: list[tuple[Any, Stream]]) -> None:
        self._stored = stored
        self._streams = streams
        self._flat: torch.Tensor | None = None
        self._at = 0

    def read(self, count: int) -> torch.Tensor:
        if self._flat is None:
            self._flat = self._assembled().reshape(-1)
        part = self._flat[self._at : self._at + count]
        self._at += count
        if self._at == self._flat.numel():
            self._flat = torch.empty(0)  # its memory goes before the next one's comes
        return part

    def _assembled(self) -> torch.Tensor:
        whole = torch.empty(self._stored.shape, dtype=self._stored.dtype)
        seen = torch.zeros(self._stored.shape, dtype=torch.bool)
        for box, stream in self._streams:
            where = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
            whole[where] = stream.read(box.elements).view(box.sizes)
            seen[where] = True
        if not seen.all():
            raise CheckpointError(f"the parts of {self._stored.name[:80]!r} overlap")
        return whole


class _Widened:
    """A source in fp32."""

    def __init__(self, source: states.Source) -> None:
        self._source = source

    def read(self, count: int) -> torch.Tensor:
        return self._source.read(count).float()


@contextmanager
def _opened(path: Path) -> Iterator[Directory]:
    directory = Directory(seam.SYSTEM, path)
    try:
        yield directory
    finally:
        directory.close()


class _Load:
    """One load: checks all it can, then changes the model."""

    def __init__(self, engine: Engine, directory: Directory, optimizer: Optimizer | None) -> None:
        self._engine = engine
        self._directory = directory
        self._optimizer = optimizer
        self._tensors = directory.content.tensors
        self._values: dict[str, states.Source] = {}
        self._moments: dict[str, dict[str, states.Source]] = {}
        self._buffers: dict[torch.Tensor, Stored] = {}
        self._steps: dict[int, int] = {}
        self._hyper: list[dict[str, Any]] = []

    def match(self, model_key: str, optimizer_key: str) -> None:
        """Find everything, before anything changes."""
        prefix = f"{model_key}." if model_key else ""
        aliases: dict[int, list[str]] = {}
        for name, parameter in self._engine.model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        known = set()
        for binding in states.bindings(self._engine):
            names = [binding.name, *aliases.get(id(binding.parameter), [])]
            known.update(names)
            stored = self._find(prefix, names, tuple(binding.slot.shape))
            if stored.dtype.is_floating_point != binding.store.run.dtype.is_floating_point:
                raise ModelError(
                    f"{binding.name}: the checkpoint has {stored.dtype}, the model another kind of number"
                )
            self._values[binding.name] = self._directory.source(stored)
            if self._optimizer is not None and binding.store.run.trained:
                self._match_moments(f"{optimizer_key}.state.", names, binding)
        for name, buffer in persistent_buffers(self._engine.model):
            known.add(name)
            self._buffers[buffer] = self._find(prefix, [name], tuple(buffer.shape))
        left = {n.removeprefix(prefix) for n in self._tensors if n.startswith(prefix)} - known
        left = {name for name in left if model_key or not name.startswith(f"{optimizer_key}.")}
        if left:
            raise ModelError(
                f"the model has no parameter {min(left)[:200]!r}: the checkpoint is of another model"
            )
        if self._optimizer is not None:
            self._match_groups(f"{optimizer_key}.param_groups.", self._optimizer, aliases)

    def _find(self, prefix: str, names: list[str], shape: tuple[int, ...]) -> Stored:
        stored = next((self._tensors[prefix + n] for n in names if prefix + n in self._tensors), None)
        if stored is None:
            raise ModelError(f"the checkpoint has no {prefix}{names[0]}: it is of another model or optimizer")
        if stored.shape != shape:
            raise ModelError(
                f"{stored.name}: the checkpoint has shape {list(stored.shape)}, the model {list(shape)}"
            )
        return stored

    def _match_moments(self, prefix: str, names: list[str], binding: Any) -> None:
        found: dict[str, states.Source] = {}
        for moment in states.moment_names(self._engine, binding):
            stored = self._find(prefix, [f"{name}.{moment}" for name in names], tuple(binding.slot.shape))
            found[moment] = _Widened(self._directory.source(stored))
        self._moments[binding.name] = found
        step = next((s for n in names if (s := self._tensors.get(f"{prefix}{n}.step")) is not None), None)
        steps = 1.0 if step is None else float(self._whole(step))
        if not (0 <= steps < 2**62 and steps == int(steps)):
            raise CheckpointError(f"{binding.name}: a number of steps that can't be: {steps}")
        if steps:
            self._steps[binding.slot.index] = int(steps)

    def _whole(self, stored: Stored) -> torch.Tensor:
        count = 1
        for size in stored.shape:
            count *= size
        return self._directory.source(stored).read(count).view(stored.shape)

    def _match_groups(self, prefix: str, optimizer: Optimizer, aliases: dict[int, list[str]]) -> None:
        objects = self._directory.content.objects
        for number, group in enumerate(optimizer.param_groups):
            if f"{prefix}{number}.params" not in objects:
                raise CheckpointError(
                    f"the checkpoint has no {prefix}{number}.params: it has fewer parameter groups, or a flattened "
                    "optimizer state; save it by get_state_dict as it is by default"
                )
            names = self._directory.plain(f"{prefix}{number}.params")
            ours = [aliases[id(parameter)] for parameter in group["params"]]
            if type(names) is not list or len(names) != len(ours) or not all(map(_is_in, names, ours)):
                raise CheckpointError(
                    f"the optimizer's parameter group {number} is not the checkpoint's: the same parameters must be "
                    "in the same order"
                )
            keys = [key for key in group if key != "params" and f"{prefix}{number}.{key}" in objects]
            self._hyper.append({key: self._directory.plain(f"{prefix}{number}.{key}") for key in keys})
        if f"{prefix}{len(optimizer.param_groups)}.params" in objects:
            raise CheckpointError("the checkpoint has more parameter groups than the optimizer")

    @torch.no_grad()
    def run(self) -> None:
        """Change the model and the optimizer."""
        end_previous(self._engine)
        self._engine.begin_restore(whole=False)
        states.write(self._engine, self._values, self._moments, whole=False)
        for buffer, stored in self._buffers.items():
            buffer.copy_(self._whole(stored))
        if self._optimizer is not None:
            for group, values in zip(self._optimizer.param_groups, self._hyper, strict=True):
                group.update(values)
            self._optimizer.resume(self._steps, {}, 0)


def _is_in(name: Any, names: list[str]) -> bool:
    return type(name) is str and name in names
