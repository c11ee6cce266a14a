"""Weights from a Hugging Face directory of safetensors files, read tensor by tensor.

Nothing is unpickled. A file is mapped, so that the bytes of one tensor at a time are in memory.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from outcore.errors import ModelError
from outcore.model.units import UnitPlan

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_LIMIT = 64 * 1024 * 1024


class Directory:
    """The safetensors files of a directory, matched with a model's parameter names.

    A base model's checkpoint loads into a model with a head and the reverse: the model's
    ``base_model_prefix`` is added or taken away where that makes a name match. Tied weights may be
    stored under any of their names.

    Raises:
        ModelError: no safetensors file, an index that names files outside the directory, or a file that
            can't be read.
    """

    def __init__(self, path: str | Path, model: nn.Module) -> None:
        self._path = Path(path)
        self._files = self._index()
        prefix = getattr(model, "base_model_prefix", "")
        self._prefix = f"{prefix}." if prefix else ""
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)

    def _index(self) -> dict[str, Path]:
        if not self._path.is_dir():
            raise ModelError(f"{self._path} is not a directory")
        index = self._path / INDEX
        if index.is_file():
            return self._read_index(index)
        single = self._path / SINGLE
        if not single.is_file():
            raise ModelError(f"{self._path} holds neither {SINGLE} nor {INDEX}")
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{single} is not a readable safetensors file: {error}") from None

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            if index.stat().st_size > INDEX_LIMIT:
                raise ModelError(f"{index} is larger than any index should be")
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
            names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index} is not a readable index: {error!r}") from None
        for file in set(names.values()):
            if Path(file).name != file or file in ("", ".", ".."):
                raise ModelError(f"{index} names {file!r}, which is not a file of its own directory")
            if len(file) > 255 or not (self._path / file).is_file():
                raise ModelError(f"{index} names {file}, which is missing")
        return {tensor: self._path / file for tensor, file in names.items()}

    def beside(self, plan: UnitPlan) -> int:
        return 0  # files are mapped: their pages are the system's to take back

    def origin(self) -> bytes:
        """This machine, the files, and which tensor is in which: ranks of one node that say the same read the same."""
        said = hashlib.sha256(_machine())
        for tensor, file in sorted(self._files.items()):
            said.update(f"{tensor}\0{file.name}\0".encode())
        for file in sorted(set(self._files.values())):
            try:
                found = file.stat()
            except OSError as error:
                raise ModelError(f"{file} can't be read: {error.strerror}") from None
            said.update(f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}\0".encode())
        return said.digest()

    def values(self, plan: UnitPlan) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in plan.parameters:
            key = self._find(name, parameter)
            try:
                with safe_open(self._files[key], framework="pt") as file:
                    tensor = file.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{key} can't be read from {self._files[key]}: {error}") from None
            yield name, tensor

    def _find(self, name: str, parameter: nn.Parameter) -> str:
        for alias in (name, *self._aliases.get(id(parameter), [])):
            shorter = alias.removeprefix(self._prefix) if self._prefix else alias
            for candidate in (alias, shorter, self._prefix + alias):
                if candidate in self._files:
                    return candidate
        raise ModelError(f"{self._path} has no weights for {name}")


def _machine() -> bytes:
    """What no other machine, nor this one after a restart, says of itself."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return socket.gethostname().encode()
