"""Writing a checkpoint beside its place, and committing it.

[Note: Commit]
A checkpoint is written to a folder ``.tmp-...`` next to where it will be, which its writer keeps locked. Each
file is fsynced and closed once its last byte is written, the manifest last, then the folder itself. One
rename puts the whole in place, and an fsync of the parent makes that last. Whatever fails before the rename
leaves nothing but the folder, which is removed at once or, after a crash, by the next save in this
parent: a folder whose lock is free has no writer. After a failed fsync nothing of the folder is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from outcore.checkpoint import files as seam
from outcore.checkpoint.descriptors import Writable
from outcore.checkpoint.files import Files, has_no_locks, write_all, writing
from outcore.checkpoint.manifest import LIMIT, NAME, Manifest, StoredFile, write
from outcore.checkpoint.pieces import Piece, PieceFile, Stretch, digest, raw
from outcore.errors import CheckpointError, UsageError

TEMPORARY = ".tmp-"
"""How the names of folders begin that are no checkpoints, yet or any more."""


class Cursor:
    """Writes one tensor from its first byte to its last."""

    def __init__(self, piece: Piece, file: BegunFile) -> None:
        self._piece = piece
        self._file = file
        self._done = 0
        self._hash = xxhash.xxh3_128()

    def write(self, values: torch.Tensor) -> None:
        """The next elements, contiguous and on the CPU."""
        view = raw(values)
        self._hash.update(view)
        self._file.write(view, self._piece.start + self._done)
        self._done += len(view)
        if self._done == self._piece.nbytes:
            self._file.completed(self._piece, (Stretch(self._done, self._hash.hexdigest()),))


class BegunFile:
    """A file that is made when its first byte is written. Several threads may write, each tensors of its own.

    Args:
        over: called by the thread that wrote the last byte.
    """

    def __init__(
        self, files: Writable, folder: Path, planned: PieceFile, over: Callable[[BegunFile], None]
    ) -> None:
        self._files = files
        self._over = over
        self._lock = threading.Lock()
        self._path = folder / planned.name
        self._planned = planned
        self._open = {piece for piece in planned.pieces if piece.nbytes}
        self._made = False
        for piece in planned.pieces:
            if not piece.nbytes:
                piece.stretches = (Stretch(0, digest(b"")),)

    def begin(self) -> None:
        """Make the file and write its header."""
        with self._lock:
            if not self._made:
                self._files.create(self._path, memoryview(self._planned.header))
                self._made = True

    def write(self, view: memoryview, offset: int) -> None:
        self.begin()
        self._files.write(self._path, view, offset)

    def completed(self, piece: Piece, stretches: tuple[Stretch, ...]) -> None:
        """A tensor is written to its end."""
        piece.stretches = stretches
        with self._lock:
            self._open.discard(piece)
            over = not self._open
        if over:
            self._over(self)

    def finish(self) -> None:
        """Make the file durable and close it."""
        self._files.finish(self._path)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor of the file has any bytes."""
        return not self._planned.body


class Writer:
    """The files of one checkpoint, while they are written.

    Each is made durable as soon as its last byte is written, by whoever calls `settle` next: that may take seconds,
    which a thread that trains does not have.
    """

    def __init__(self, files: Files, folder: Path, planned: list[PieceFile]) -> None:
        self._files = files
        self._folder = folder
        self._planned = planned
        self._over: deque[BegunFile] = deque()
        self._writable = Writable(files)
        self._begun = {
            file.name: BegunFile(self._writable, folder, file, self._over.append) for file in planned
        }

    def cursor(self, piece: Piece) -> Cursor:
        """Where the bytes of a tensor go."""
        return Cursor(piece, self._begun[piece.file])

    def begin(self, pieces: Iterable[Piece]) -> list[str]:
        """Make the files of tensors that others write to and make durable; returns their names."""
        names = list(dict.fromkeys(piece.file for piece in pieces if piece.nbytes))
        for name in names:
            self._begun[name].begin()
        return names

    def settle(self) -> None:
        """Make the files durable that are written to their end.

        Raises:
            DiskFullError, DiskWriteError: the system refused.
        """
        while self._over:
            self._over.popleft().finish()

    def stored(self) -> dict[str, StoredFile]:
        """What the manifest says of the files."""
        return {f.name: StoredFile(f.nbytes, len(f.header), digest(f.header)) for f in self._planned}

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest; all tensors are written.

        Raises:
            DiskFullError, DiskWriteError: the system refused.
            UsageError: the manifest would be too large.
        """
        assert all(piece.stretches for file in self._planned for piece in file.pieces), (
            "a tensor is not written"
        )
        data = write(manifest)
        if len(data) > LIMIT:
            raise UsageError(
                f"the checkpoint's manifest would have {len(data):,} bytes, and may have {LIMIT:,}: "
                "keep less in extra, or keep it in tensors"
            )
        self.finish_with(NAME, data)

    def finish_with(self, name: str, data: bytes) -> None:
        """Write a last file, and make the folder durable."""
        self.settle()
        path = self._folder / name
        with writing(path):
            fd = self._files.create(path)
            try:
                write_all(self._files, fd, memoryview(data), 0, path)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
        self.finish_empty()

    def finish_empty(self) -> None:
        """Make the files whose tensors have no bytes, and make the folder durable."""
        self.settle()
        for file in self._begun.values():
            if file.is_empty:
                file.begin()
                file.finish()
        with writing(self._folder):
            self._files.sync_directory(self._folder)

    def close(self) -> None:
        """Close what is open still."""
        self._writable.close()


@contextmanager
def committed(path: Path) -> Iterator[tuple[Files, Path]]:
    """A folder to write to, which becomes ``path`` if the block succeeds, and is removed if it does not.

    Raises:
        UsageError: there is something at ``path`` already, or its name is no name for a checkpoint.
        DiskFullError, DiskWriteError: the system refused.
    """
    files = seam.SYSTEM
    if not path.name or path.name == ".." or path.name.startswith(TEMPORARY):
        raise UsageError(f"{path} is no path for a checkpoint: its last part must be a name of its own")
    if os.path.lexists(path):
        raise UsageError(
            f"{path} exists already and a checkpoint is never overwritten: save to another path, or remove it"
        )
    parent = path.parent
    with writing(parent):
        _make_parents(files, parent)
        sweep(files, parent)
        folder, lock = _reserve(files, parent, path.name)
    try:
        try:
            yield files, folder
            with writing(path):
                files.rename(folder, path)
                try:
                    files.sync_directory(parent)
                except BaseException:
                    files.rename(path, folder)
                    raise
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(folder)
            raise
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                files.close(lock)


def discard(path: Path) -> None:
    """Remove a checkpoint, so that it is never seen in part: it is renamed first.

    Raises:
        DiskWriteError: the system refused.
    """
    files = seam.SYSTEM
    with writing(path):
        folder = path.parent / _temporary(path.name)
        files.rename(path, folder)
        files.sync_directory(path.parent)
        with contextlib.suppress(FileNotFoundError):  # a save beside may have swept it
            files.remove(folder)


def sweep(files: Files, parent: Path) -> None:
    """Remove what writers that are dead left in ``parent``; best effort."""
    with contextlib.suppress(OSError):
        for name in files.names(parent):
            if name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    _remove_unlocked(files, parent / name)


def _remove_unlocked(files: Files, folder: Path) -> None:
    lock = files.lock(folder)
    if lock is not None:
        try:
            files.remove(folder)
        finally:
            files.close(lock)


def _make_parents(files: Files, parent: Path) -> None:
    missing = []
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_directory(folder)
        files.sync_directory(folder.parent)


def _temporary(name: str) -> str:
    return f"{TEMPORARY}{name[:100]}-{os.getpid()}-{secrets.token_hex(4)}"


def _reserve(files: Files, parent: Path, name: str) -> tuple[Path, int | None]:
    """A locked folder. Between making and locking it a sweep may take it for a dead writer's: then anew."""
    for _ in range(100):
        folder = parent / _temporary(name)
        files.make_directory(folder)
        try:
            lock = files.lock(folder)
        except OSError as error:
            if has_no_locks(error):
                return folder, None
            with contextlib.suppress(OSError):
                files.remove(folder)
            raise
        if lock is not None:
            return folder, lock
    raise CheckpointError(f"no folder could be kept locked in {parent}: too many saves at once")
