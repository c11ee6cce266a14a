"""The seam between the disk tier and the outside: one private file, read and written in blocks.

[Note: Thread contract]
`BlockFile.pread` and `BlockFile.pwrite` may be called by any number of threads at once, on ranges that do
not overlap. `BlockFile.extend` may run beside transfers, but not beside itself. `BlockFile.close` comes last,
once, when nothing else runs. Each call does one attempt: it returns how many bytes it moved, which may be fewer
than asked, or raises the `OSError` of the system. What a short transfer or an error means is decided above
(`outcore.memory.disk`).

The tier above only asks for whole blocks (`BLOCK`) at block offsets with block-aligned memory, which is
what ``O_DIRECT`` demands.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Protocol

BLOCK = 4096
"""Bytes of a block: offsets, lengths and addresses of every transfer are multiples of it."""

_ANONYMOUS_REFUSED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_ALLOCATE_REFUSED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class BlockFile(Protocol):
    """One file of the disk tier; see [Note: Thread contract]."""

    @property
    def name(self) -> str:
        """For messages: where the file is."""

    def pread(self, view: memoryview, offset: int) -> int:
        """Read into ``view`` from ``offset``; the bytes read, 0 at the end of the file."""

    def pwrite(self, view: memoryview, offset: int) -> int:
        """Write ``view`` at ``offset``; the bytes written."""

    def extend(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, with space behind it, so that a full disk shows now."""

    def close(self) -> None:
        """Give everything back."""


class DirectFile:
    """A private file in ``directory`` that has no name, past the page cache where the file system allows.

    Nobody else can open it, two runs never meet in it, and its space is free again when the process ends,
    also by SIGKILL. Where the file system knows no nameless files one with a name is made and unlinked at
    once (a kill between the two leaves an empty file behind).

    Attributes:
        direct: whether transfers go past the page cache (``O_DIRECT``, or ``F_NOCACHE`` on macOS).

    Raises:
        OSError: the directory can't be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._fd = -1
        self._name = os.fspath(directory)
        self._length = 0
        self._fd, self.direct = _open(self._name)

    @property
    def name(self) -> str:
        return self._name

    def pread(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [view], offset)

    def pwrite(self, view: memoryview, offset: int) -> int:
        return os.pwritev(self._fd, [view], offset)

    def extend(self, nbytes: int) -> None:
        if nbytes <= self._length:
            return
        try:
            # A system without it writes into each block instead, which O_DIRECT refuses: also EINVAL.
            os.posix_fallocate(self._fd, self._length, nbytes - self._length)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in _ALLOCATE_REFUSED:
                with contextlib.suppress(OSError):  # what was allocated before space ran out
                    os.ftruncate(self._fd, self._length)
                raise
            os.ftruncate(self._fd, nbytes)
        self._length = nbytes

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _open(directory: str) -> tuple[int, bool]:
    """A file descriptor without a name, and whether it is direct."""
    for direct in (True, False):
        extra = getattr(os, "O_DIRECT", 0) if direct else 0
        if direct and not extra:
            continue
        try:
            return _open_anonymous(directory, extra), direct
        except OSError as error:
            if error.errno not in _ANONYMOUS_REFUSED:
                raise
    fd, path = tempfile.mkstemp(prefix=".outcore-", dir=directory)
    try:
        os.unlink(path)
        return fd, _go_direct(fd)
    except BaseException:
        os.close(fd)
        raise


def _open_anonymous(directory: str, extra: int) -> int:
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    # With O_EXCL it can't be given a name later.
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | extra, 0o600)


def _go_direct(fd: int) -> bool:
    """Turn the page cache off for an open file, if the system can."""
    try:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        else:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except (OSError, AttributeError):
        return False
    return True


class MemoryFile:
    """A file in memory, for tests and runs so small that no disk is worth it.

    Args:
        capacity: bytes after which it is full, as a disk would be.
    """

    def __init__(self, capacity: int = 1 << 40, name: str = "memory") -> None:
        self._bytes = bytearray()
        self._capacity = capacity
        self._name = name
        self._lock = threading.Lock()
        self.closed = False

    @property
    def name(self) -> str:
        return self._name

    def pread(self, view: memoryview, offset: int) -> int:
        with self._lock:
            found = self._bytes[offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)

    def pwrite(self, view: memoryview, offset: int) -> int:
        self.extend(offset + len(view))
        with self._lock:
            self._bytes[offset : offset + len(view)] = view
        return len(view)

    def extend(self, nbytes: int) -> None:
        if nbytes > self._capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._lock:
            if nbytes > len(self._bytes):
                self._bytes.extend(bytes(nbytes - len(self._bytes)))

    def close(self) -> None:
        self._bytes = bytearray()
        self.closed = True


def open_files(places: Sequence[str | os.PathLike[str] | BlockFile]) -> list[BlockFile]:
    """A directory stands for a new `DirectFile` in it, a `BlockFile` for itself. All are opened, or none."""
    opened: list[BlockFile] = []
    try:
        for place in places:
            opened.append(DirectFile(place) if isinstance(place, (str, os.PathLike)) else place)
    except BaseException:
        for file in opened:
            file.close()
        raise
    return opened
