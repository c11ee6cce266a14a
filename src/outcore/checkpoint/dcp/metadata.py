"""The ``.metadata`` of torch.distributed.checkpoint: which tensors there are, and in which pieces of which files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outcore.checkpoint.dcp import data
from outcore.checkpoint.dcp.data import Made, Name, Table
from outcore.errors import CheckpointError

NAME = ".metadata"
MOST = 1 << 62

DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""The dtypes that are read, as ``torch.float32``."""

_METADATA = "torch.distributed.checkpoint.metadata."
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
NAMES = frozenset(
    {
        *(
            _METADATA + name
            for name in (
                *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
                *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
            )
        ),
        *(
            f"{module}.{path}"
            for module in ("pathlib", "pathlib._local")
            for path in ("PosixPath", "WindowsPath")
        ),
        *DTYPES,
        _STORAGE,
        _SIZE,
        "torch.serialization._get_layout",
        "collections.OrderedDict",
    }
)
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,180}", re.ASCII)
_DIMENSIONS = 64


@dataclass(frozen=True)
class Blob:
    """Bytes of one file of the directory."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Box:
    """A part of a tensor and where it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Stored:
    """A tensor: its parts cover it, each element once."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Content:
    """What a directory holds: tensors, and other objects."""

    tensors: Mapping[str, Stored]
    objects: Mapping[str, Blob]


def parse(raw: bytes) -> Content:
    """Read the bytes of a ``.metadata``.

    Raises:
        CheckpointError: they are none, or say something impossible.
    """
    top = _of(data.read(raw, NAMES, NAME), "Metadata")
    blobs = _blobs(_field(top, "storage_data"))
    tensors, objects = {}, {}
    for name, described in _table(_field(top, "state_dict_metadata")):
        if type(name) is not str:
            raise CheckpointError(f"{NAME} has a key that is no text")
        if type(described) is Made and described.of == _METADATA + "BytesStorageMetadata":
            objects[name] = _blob(blobs, name, None)
        else:
            tensors[name] = _tensor(name, _of(described, "TensorStorageMetadata"), blobs)
    return Content(tensors, objects)


_Blobs = Mapping[tuple[str, tuple[int, ...] | None], Blob]


def _blobs(stored: Any) -> _Blobs:
    found: dict[tuple[str, tuple[int, ...] | None], Blob] = {}
    for index, info in _table(stored):
        index = _of(index, "MetadataIndex")
        name, offset = _field(index, "fqn"), _field(index, "offset")
        if type(name) is not str:
            raise CheckpointError(f"{NAME} has a key that is no text")
        found[name, None if offset is None else _numbers(offset)] = _place(info)
    return found


def _place(info: Any) -> Blob:
    if type(info) is not Made or info.of != _STORAGE:
        raise CheckpointError(f"{NAME} does not say where things are as torch's own writer does")
    file, start, nbytes = (_field(info, key) for key in ("relative_path", "offset", "length"))
    if _field(info, "transform_descriptors"):
        raise CheckpointError(
            f"{NAME}: transformed or compressed data can't be read: save it without extensions"
        )
    if type(file) is not str or not _FILE.fullmatch(file):
        raise CheckpointError(f"{NAME} names {str(file)[:80]!r}, which is not a file of its own directory")
    if type(start) is not int or type(nbytes) is not int or not 0 <= start <= MOST or not 0 <= nbytes <= MOST:
        raise CheckpointError(f"{NAME}: a place in {file} that can't be")
    return Blob(file, start, nbytes)


def _tensor(name: str, described: Made, blobs: _Blobs) -> Stored:
    properties = _of(_field(described, "properties"), "TensorProperties").state
    dtype = properties[0] if type(properties) is tuple and properties else None
    if type(dtype) is not Name or dtype.text not in DTYPES:
        raise CheckpointError(f"{NAME}: {name[:80]!r} has a dtype that can't be read")
    shape = _numbers(_field(described, "size"))
    chunks = _field(described, "chunks")
    if type(chunks) is not list or not chunks:
        raise CheckpointError(f"{NAME}: {name[:80]!r} has no parts")
    boxes = []
    for chunk in chunks:
        chunk = _of(chunk, "ChunkStorageMetadata")
        offsets, sizes = _numbers(_field(chunk, "offsets")), _numbers(_field(chunk, "sizes"))
        boxes.append(Box(offsets, sizes, _blob(blobs, name, offsets)))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{NAME}: a part of {name[:80]!r} has other dimensions than it")
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise CheckpointError(f"{NAME}: a part of {name[:80]!r} lies outside of it")
    if sum(box.elements for box in boxes) != math.prod(shape):
        raise CheckpointError(f"{NAME}: the parts of {name[:80]!r} do not cover it, each element once")
    boxes.sort(key=lambda box: box.offsets)
    return Stored(name, DTYPES[dtype.text], shape, tuple(boxes))


def _blob(blobs: _Blobs, name: str, offsets: tuple[int, ...] | None) -> Blob:
    found = blobs.get((name, offsets))
    if found is None:
        raise CheckpointError(f"{NAME} does not say where {name[:80]!r} is")
    return found


def _of(value: Any, kind: str) -> Made:
    if type(value) is not Made or value.of != _METADATA + kind:
        raise CheckpointError(f"{NAME} is not that of a checkpoint of torch: {kind} is missing")
    return value


def _field(made: Made, key: str) -> Any:
    if type(made.state) is not Table:
        raise CheckpointError(f"{NAME}: {made.of} has no values")
    return made.state.get(key)


def _table(value: Any) -> list[tuple[Any, Any]]:
    if type(value) is not Table:
        raise CheckpointError(f"{NAME} is not that of a checkpoint of torch: a dictionary is missing")
    return value.pairs


def _numbers(value: Any) -> tuple[int, ...]:
    found = value.arguments if type(value) is Made and value.of == _SIZE else None
    numbers = found[0] if type(found) is tuple and len(found) == 1 else None
    if isinstance(numbers, (tuple, list)) and len(numbers) <= _DIMENSIONS:
        checked = tuple(number for number in numbers if type(number) is int and 0 <= number <= MOST)
        if len(checked) == len(numbers) and math.prod(checked) <= MOST:
            return checked
    raise CheckpointError(f"{NAME}: a shape or an offset that can't be")
