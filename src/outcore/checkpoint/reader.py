"""Reading a checkpoint: nothing is believed before it was checked, and nothing is unpickled."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import xxhash

from outcore.checkpoint import files as seam
from outcore.checkpoint.descriptors import Readable
from outcore.checkpoint.files import Files, read_all, reading
from outcore.checkpoint.manifest import LIMIT, NAME, Manifest, parse
from outcore.checkpoint.pieces import Piece, digest, raw
from outcore.checkpoint.underway import wait_for
from outcore.checkpoint.writer import TEMPORARY
from outcore.errors import CheckpointError
from outcore.memory.refusal import allocating


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of a committed checkpoint.

    Raises:
        CheckpointError: there is none, it was never committed, or it is damaged.
        DiskReadError: the system refused.
    """
    wait_for(path)
    if path.name.startswith(TEMPORARY):
        raise CheckpointError(f"{path} was never committed: it is what an interrupted save left")
    files, place = seam.SYSTEM, path / NAME
    with reading(place):
        fd = files.open(place)
    try:
        with reading(place):
            size = files.size(fd)
        if size > LIMIT:
            raise CheckpointError(f"{place} has {size:,} bytes, and no manifest has more than {LIMIT:,}")
        data = bytearray(size)
        read_all(files, fd, memoryview(data), 0, place)
    finally:
        with contextlib.suppress(OSError):  # nothing was written
            files.close(fd)
    try:
        return parse(bytes(data))
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from None


PART = 1 << 20
"""Elements that are read at a time where nothing else says how many."""


class Source:
    """Reads one tensor from its first element to its last, and compares the digest of each stretch at its end."""

    def __init__(self, files: Readable, path: Path, piece: Piece) -> None:
        self._files = files
        self._path = path
        self._piece = piece
        self._done = 0
        self._at = 0
        self._hash: Any = xxhash.xxh3_128()

    def read(self, count: int) -> torch.Tensor:
        """The next elements, flat.

        Raises:
            CheckpointError: a stretch has ended now and its digest is another, or the file is cut short.
            DiskReadError: the system refused.
        """
        tensor = torch.empty(count, dtype=self._piece.dtype)
        view = raw(tensor)
        self._files.read(self._path, view, self._piece.start + self._done)
        while len(view):
            view = view[self._verify(view) :]
        return tensor

    def _verify(self, view: memoryview) -> int:
        """Take what belongs to the present stretch; how many bytes that was."""
        stretch = self._piece.stretches[self._at]
        taken = view[: stretch.stop - self._done]
        self._done += len(taken)
        if self._hash is not None:
            self._hash.update(taken)
        if self._done == stretch.stop:
            if self._hash is not None and self._hash.hexdigest() != stretch.digest:
                raise CheckpointError(
                    f"{self._path} is damaged: the bytes of {self._piece.key} have another digest than when they "
                    "were saved"
                )
            self._at += 1
            self._hash = xxhash.xxh3_128()
        return len(taken)

    def seek(self, element: int) -> None:
        """Go on with an element further on: a stretch that is then not read from its first byte is not compared."""
        self._done = element * self._piece.dtype.itemsize
        self._at = bisect_right(self._piece.stretches, self._done, key=lambda stretch: stretch.stop)
        self._hash = xxhash.xxh3_128() if self._done == self._start() else None

    def rest(self) -> None:
        """Read the stretch that was begun to its end, and compare its digest.

        Raises:
            CheckpointError, DiskReadError: as `read`.
        """
        if self._hash is not None and self._done > self._start():
            stop = self._piece.stretches[self._at].stop
            while self._start() < self._done < stop:
                self.read(min(PART, (stop - self._done) // self._piece.dtype.itemsize))

    def _start(self) -> int:
        """Where the present stretch begins."""
        return self._piece.stretches[self._at - 1].stop if self._at else 0

    def whole(self) -> torch.Tensor:
        """The tensor in its shape."""
        if not self._piece.nbytes:
            return torch.empty(self._piece.shape, dtype=self._piece.dtype)
        count = self._piece.nbytes // self._piece.dtype.itemsize
        return self.read(count).view(self._piece.shape)


class Reader:
    """The files of a checkpoint, all of them present, of the right length and with intact headers."""

    def __init__(self, files: Files, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files = Readable(files)
        self._path = path

    def check(self) -> None:
        """Look at each file, one after the other.

        Raises:
            CheckpointError: a file is missing, has another length, or a damaged header.
            DiskReadError: the system refused.
        """
        for name, stored in self.manifest.files.items():
            place = self._path / name
            size = self._files.size(place)
            if size != stored.nbytes:
                raise CheckpointError(f"{place} has {size:,} bytes and should have {stored.nbytes:,}")
            header = bytearray(stored.header)
            self._files.read(place, memoryview(header), 0)
            if digest(bytes(header)) != stored.digest:
                raise CheckpointError(f"{place} is damaged: its header is not the one that was saved")

    def source(self, piece: Piece) -> Source:
        """Where a tensor is read."""
        return Source(self._files, self._path / piece.file, piece)

    def close(self) -> None:
        self._files.close()


@contextmanager
def opened(path: Path) -> Iterator[Reader]:
    """A committed checkpoint whose manifest and files were checked, short of the tensors' bytes."""
    reader = Reader(seam.SYSTEM, path, read_manifest(path))
    try:
        reader.check()
        yield reader
    finally:
        reader.close()


@allocating("a checkpoint")
def verify(path: str | PathLike[str]) -> Manifest:
    """Read all of a checkpoint and compare every digest.

    Returns:
        The manifest: files, parameters with shapes and moments, the optimizer's class, groups and steps.

    Raises:
        CheckpointError: something is missing or damaged.
        DiskReadError: the system refused.
    """
    with opened(Path(path)) as reader:
        for piece in reader.manifest.pieces():
            for _ in parts(reader, piece):
                pass
        return reader.manifest


def parts(reader: Reader, piece: Piece) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, at most `PART` at a time; its digest is compared after the last.

    Raises:
        CheckpointError: it is damaged.
        DiskReadError: the system refused.
    """
    source, left = reader.source(piece), piece.nbytes // piece.dtype.itemsize
    while left:
        count = min(left, PART)
        yield source.read(count)
        left -= count


def fault(reader: Reader, piece: Piece) -> str:
    """What is wrong with a tensor's bytes; nothing if it is whole.

    Raises:
        DiskReadError: the system refused.
    """
    try:
        for _ in parts(reader, piece):
            pass
    except CheckpointError as error:
        return str(error)
    return ""
