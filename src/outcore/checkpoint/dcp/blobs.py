"""What ``torch.save`` wrote: a zip archive of a description and, for a tensor, its bytes as they are."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint.dcp import data
from outcore.checkpoint.dcp.data import Made, Name, Table
from outcore.checkpoint.dcp.metadata import Blob, Box, Stored
from outcore.checkpoint.descriptors import Readable
from outcore.checkpoint.pieces import raw
from outcore.errors import CheckpointError, TierError

LIMIT = 1 << 20
"""No archive's description or list of contents is longer than this, in bytes."""

_REBUILD = "torch._utils._rebuild_tensor_v2"
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_NAMES = frozenset({_REBUILD, "collections.OrderedDict", *_STORAGES})


class Slice(io.RawIOBase):
    """A range of a file, for `zipfile`; no more than `LIMIT` bytes are read at once."""

    def __init__(self, files: Readable, path: Path, blob: Blob) -> None:
        self._files, self._path, self._blob = files, path, blob
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.nbytes}[whence]
        if not base + offset >= 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._blob.nbytes - self._at)
        count = left if size is None or size < 0 else min(size, left)
        if count > LIMIT:
            raise CheckpointError(
                f"{self._path}: a list of contents of {count:,} bytes, and none has more than {LIMIT:,}"
            )
        found = bytearray(count)
        self._files.read(self._path, memoryview(found), self._blob.start + self._at)
        self._at += count
        return bytes(found)


@dataclass(frozen=True)
class Storage:
    """The bytes of a tensor's part: contiguous ones from ``start`` in the file, with their checksum."""

    path: Path
    start: int
    nbytes: int
    crc: int


class Archive:
    """One archive within a file of the directory.

    Raises:
        CheckpointError: it is none.
    """

    def __init__(self, files: Readable, path: Path, blob: Blob) -> None:
        self._files, self._path, self._blob = files, path, blob
        size = files.size(path)
        if blob.start + blob.nbytes > size:
            raise CheckpointError(f"{path} has {size:,} bytes, and a part of it is said to lie beyond")
        try:
            with zipfile.ZipFile(Slice(files, path, blob)) as archive:
                self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        except TierError:
            raise
        except (
            zipfile.BadZipFile,
            NotImplementedError,
            ValueError,
            OSError,
            EOFError,
            struct.error,
        ) as error:
            raise self._bad(str(error)) from None

    def _bad(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} at byte {self._blob.start:,} is not what torch.save writes: {why}"
        )

    def described(self) -> Any:
        """The description, as `data.read` gives it."""
        return data.read(self._small("data.pkl"), _NAMES, f"{self._path} at byte {self._blob.start:,}")

    def _small(self, name: str) -> bytes:
        info = self._member(name)
        if info.file_size > LIMIT:
            raise self._bad(f"{name} of {info.file_size:,} bytes")
        found = bytearray(info.file_size)
        self._files.read(self._path, memoryview(found), self._start(info))
        if zlib.crc32(found) != info.CRC:
            raise self._damaged()
        return bytes(found)

    def _damaged(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged: the bytes of an archive have another checksum than when they were saved"
        )

    def _member(self, name: str) -> zipfile.ZipInfo:
        info = self._members.get(name)
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise self._bad(f"{name} is missing or compressed")
        return info

    def _start(self, info: zipfile.ZipInfo) -> int:
        """The first byte of a member in the file."""
        header = bytearray(30)
        if not 0 <= info.header_offset <= self._blob.nbytes - len(header):
            raise self._bad("a member lies beyond its ends")
        self._files.read(self._path, memoryview(header), self._blob.start + info.header_offset)
        name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = info.header_offset + len(header) + name + extra
        if header[:4] != b"PK\3\4" or start + info.file_size > self._blob.nbytes:
            raise self._bad("a member lies beyond its end")
        return self._blob.start + start

    def storage(self, stored: Stored, box: Box) -> Storage:
        """Where the elements of a part are, in order."""
        made = self.described()
        arguments = made.arguments if type(made) is Made and made.of == _REBUILD else ()
        if type(arguments) is not tuple or len(arguments) < 4:
            raise self._bad("no plain tensor")
        storage, offset, size, stride = arguments[:4]
        place = storage.arguments if type(storage) is Made and storage.of == "persistent" else ()
        if type(place) is not tuple or len(place) != 5 or place[0] != "storage" or type(place[1]) is not Name:
            raise self._bad("no plain storage")
        if _STORAGES.get(place[1].text) is not stored.dtype or type(place[2]) is not str:
            raise self._bad(f"not {stored.dtype}, as the metadata has it")
        contiguous = _contiguous(box.sizes)
        if size != box.sizes or offset != 0 or not _same(size, stride, contiguous):
            raise self._bad(
                "a tensor of another shape than the metadata has it, or one that is not contiguous"
            )
        if "byteorder" in self._members and self._small("byteorder") != b"little":
            raise self._bad("written on a machine with the other order of bytes")
        info = self._member(f"data/{place[2]}")
        if info.file_size != box.elements * stored.dtype.itemsize:
            raise self._bad(f"{info.file_size:,} bytes for {box.elements:,} elements")
        return Storage(self._path, self._start(info), info.file_size, info.CRC)

    def plain(self) -> Any:
        """The object, if it is of JSON's types or a tuple.

        Raises:
            CheckpointError: it is another.
        """
        return _plain(self.described(), self._bad)


def _plain(value: Any, bad: Any, depth: int = 8) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth and type(value) in (list, tuple):
        return type(value)(_plain(item, bad, depth - 1) for item in value)
    if depth and type(value) is Table and all(type(key) is str for key, _ in value.pairs):
        return {key: _plain(item, bad, depth - 1) for key, item in value.pairs}
    raise bad("an object that is no plain value")


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _same(sizes: Sequence[int], found: Any, wanted: Sequence[int]) -> bool:
    """Whether strides mean the same order; those of dimensions of one element mean nothing."""
    if type(found) is not tuple or len(found) != len(wanted):
        return False
    empty = math.prod(sizes) == 0
    return all(empty or size == 1 or f == w for size, f, w in zip(sizes, found, wanted, strict=True))


class Stream:
    """A tensor's elements in order, from parts that lie one behind the other."""

    def __init__(self, files: Readable, dtype: torch.dtype, storages: Sequence[Storage]) -> None:
        self._files, self._dtype = files, dtype
        self._left = list(reversed([storage for storage in storages if storage.nbytes]))
        self._done = self._crc = 0

    def read(self, count: int) -> torch.Tensor:
        """The next elements, flat.

        Raises:
            CheckpointError: a part has ended now, and its checksum is another.
            DiskReadError: the system refused.
        """
        tensor = torch.empty(count, dtype=self._dtype)
        view, at = raw(tensor), 0
        while at < len(view):
            storage = self._left[-1]
            part = view[at : at + storage.nbytes - self._done]
            self._files.read(storage.path, part, storage.start + self._done)
            self._crc = zlib.crc32(part, self._crc)
            self._done += len(part)
            at += len(part)
            if self._done == storage.nbytes:
                if self._crc != storage.crc:
                    raise CheckpointError(
                        f"{storage.path} is damaged: a tensor's bytes have another checksum than when they were saved "
                        "(or they were saved with torch.serialization.set_crc32_options(False))"
                    )
                self._left.pop()
                self._done = self._crc = 0
        return tensor
