"""Tensors in safetensors files, as a layout that is known before the first byte is written.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes one after the other, little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

from outcore.errors import UsageError

FILE_BYTES = 256 * 1024 * 1024
"""A file takes no further tensor once it is this large."""

HEADER_LIMIT = 64 * 1024 * 1024
"""No header is longer than this."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes a file can hold, by safetensors' names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype.

    Raises:
        UsageError: it has none.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UsageError(f"tensors of {dtype} can't be saved") from None


def digest(data: bytes | memoryview) -> str:
    """The checksum of this format: XXH3, 128 bits, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Stretch:
    """Bytes of a tensor that were written as one, from the end of the stretch before.

    Attributes:
        stop: one past the last byte, within the tensor.
        digest: of these bytes.
    """

    stop: int
    digest: str


@dataclass(eq=False)
class Piece:
    """One tensor and its place.

    Attributes:
        start: first byte within the file, stop: one past the last.
        stretches: all of its bytes, once they are written: one stretch, or several where several ranks wrote.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0
    stretches: tuple[Stretch, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


@dataclass(eq=False)
class PieceFile:
    """A file to be written: its header and the tensors behind it, without gaps."""

    name: str
    pieces: list[Piece] = field(default_factory=list)
    header: bytes = b""

    @property
    def body(self) -> int:
        """Bytes of the tensors."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.body

    def seal(self, metadata: Mapping[str, str] | None) -> None:
        """Fix the header and the tensors' places."""
        entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
        end = 0
        for piece in self.pieces:
            entries[piece.key] = {
                "dtype": dtype_name(piece.dtype),
                "shape": list(piece.shape),
                "data_offsets": [end, end + piece.nbytes],
            }
            end += piece.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        end = len(self.header)
        for piece in self.pieces:
            piece.file, piece.start = self.name, end
            end += piece.nbytes

    def rename(self, name: str) -> None:
        """Give the file another name, before it is written."""
        self.name = name
        for piece in self.pieces:
            piece.file = name


class Layout:
    """Distributes tensors over files; files are named after what they hold, ``parameters-00001.safetensors``.

    Args:
        file_bytes: a file takes no further tensor once it is this large; by default `FILE_BYTES`.
        metadata: strings that each header carries.
    """

    def __init__(self, file_bytes: int | None = None, metadata: Mapping[str, str] | None = None) -> None:
        self._file_bytes = FILE_BYTES if file_bytes is None else file_bytes
        self._metadata = metadata
        self._files: dict[str, list[PieceFile]] = {}
        self._keys: set[tuple[str, str]] = set()

    def add(self, kind: str, key: str, dtype: torch.dtype, shape: Sequence[int]) -> Piece:
        """Make room for a tensor.

        Raises:
            UsageError: two tensors of one kind have the same key, or a dtype can't be saved.
        """
        dtype_name(dtype)
        if (kind, key) in self._keys or key == "__metadata__":
            raise UsageError(f"two of the model's {kind} would be saved under the name {key!r}")
        self._keys.add((kind, key))
        files = self._files.setdefault(kind, [])
        if not files or files[-1].body >= self._file_bytes:
            files.append(PieceFile(f"{kind}-{len(files) + 1:05d}.safetensors"))
        piece = Piece(key, dtype, tuple(shape))
        files[-1].pieces.append(piece)
        return piece

    def seal(self) -> list[PieceFile]:
        """Fix all places; nothing can be added afterwards."""
        found = [file for files in self._files.values() for file in files]
        for file in found:
            file.seal(self._metadata)
        return found
