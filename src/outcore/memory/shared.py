"""Host memory that several processes of one machine map: a file without a name, which ends with the last of them.

[Note: Nothing stays behind]
The memory is a ``memfd``: it never has a name in a file system, so whatever kills the processes, the system takes it
back when the last one is gone. The others open it by the descriptor of the one that made it, which ``/proc`` gives to
processes of the same user; where that is refused, or leads to something else (another container's numbers), they don't
share. Locks are those of the system too: they go with their owner.

[Note: Who gives a shared page back]
A frame's pages are there while anybody holds it. Each process has a byte in the memory's head for each frame, and sets
it before it writes there; who clears the last one takes the pages away, for all. A lock around both sees to it that
nobody's first bytes go with the pages of those before.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from outcore.memory.host import PAGE

TOKEN = 32
"""Bytes at the start by which the memory is known."""


class SharedMemory:
    """One mapping of it. It lives as long as any tensor of it in any process.

    Attributes:
        tensor: the bytes, shape [nbytes], uint8. Zeros until they are written; they take no memory until then.
        buffer: the same.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = -1
        try:
            self._mapping = mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.buffer = memoryview(self._mapping)
        self._lock = threading.Lock()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory.

        Raises:
            OSError: the system has no such memory, or refuses addresses.
        """
        if sys.platform != "linux":
            raise OSError("only Linux has memory without a name")
        fd = os.memfd_create("outcore", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        memory = cls(fd, nbytes)
        memory.buffer[:TOKEN] = secrets.token_bytes(TOKEN)
        return memory

    @classmethod
    def open(cls, address: bytes) -> SharedMemory:
        """Memory that another process made.

        Raises:
            OSError: it can't be reached from here.
        """
        process, number, nbytes = (int.from_bytes(address[at : at + 8], "little") for at in (0, 8, 16))
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != nbytes or os.pread(fd, TOKEN, 0) != address[24:]:
                raise OSError("this is not the memory that was meant")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @property
    def address(self) -> bytes:
        """By which other processes of this machine open it."""
        numbers = (os.getpid(), self._fd, len(self.buffer))
        return b"".join(n.to_bytes(8, "little") for n in numbers) + bytes(self.buffer[:TOKEN])

    def take_away(self, offset: int, nbytes: int) -> None:
        """Give pages back, for all processes. Both are multiples of a page; the bytes read as zeros afterwards."""
        if nbytes:
            self._mapping.madvise(mmap.MADV_REMOVE, offset, nbytes)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One thread of one process at a time. Nothing inside may wait for another process."""
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)


class SharedPlace:
    """A part of shared memory, whose pages are not its own to give back. Is `Place`.

    Args:
        parts: how many processes answer for its bytes, in equal parts.

    Attributes:
        nbytes: bytes that this process answers for, in whole pages.
        tensor: all of its bytes.
        buffer: the same.
    """

    __slots__ = ("_nbytes", "buffer", "nbytes", "tensor")

    tensor: torch.Tensor
    buffer: memoryview

    def __init__(self, nbytes: int, parts: int = 1) -> None:
        self._nbytes = nbytes
        self.nbytes = share_of(nbytes, parts)

    def lie(self, memory: SharedMemory, offset: int) -> None:
        """Its memory is there now."""
        self.tensor = memory.tensor[offset : offset + self._nbytes]
        self.buffer = memory.buffer[offset : offset + self._nbytes]

    def release(self) -> None:
        pass


def share_of(nbytes: int, parts: int) -> int:
    """Bytes of an equal part, in whole pages."""
    return -(-nbytes // (parts * PAGE)) * PAGE


class Commons:
    """Frames in shared memory; see [Note: Who gives a shared page back].

    Args:
        memory: of `size` bytes; the same for all.
        frames: bytes of each, in whole pages.
        number, processes: which process this is, and of how many.
    """

    def __init__(self, memory: SharedMemory, frames: Sequence[int], number: int, processes: int) -> None:
        self._memory = memory
        self._frames = frames
        self._number, self._processes = number, processes
        self._starts = list(accumulate(frames, initial=_head(len(frames), processes)))

    @staticmethod
    def size(frames: Sequence[int], processes: int) -> int:
        """Bytes of memory with such frames."""
        return _head(len(frames), processes) + sum(frames)

    def lie(self, place: SharedPlace, frame: int, offset: int) -> None:
        """Give a place its memory in a frame."""
        place.lie(self._memory, self._starts[frame] + offset)

    def place(self, frame: int, offset: int, nbytes: int, parts: int) -> SharedPlace:
        """A part of a frame, for whose bytes so many processes answer."""
        assert offset + nbytes <= self._frames[frame]
        found = SharedPlace(nbytes, parts)
        self.lie(found, frame, offset)
        return found

    def enter(self, frame: int) -> None:
        """This process is about to write to a frame, or to read it."""
        with self._memory.locked():
            self._memory.buffer[self._seats(frame).start + self._number] = 1

    def leave(self, frame: int) -> None:
        """It doesn't read it any more."""
        seats = self._seats(frame)
        with self._memory.locked():
            self._memory.buffer[seats.start + self._number] = 0
            if not any(self._memory.buffer[seats]):
                self._memory.take_away(self._starts[frame], self._frames[frame])

    def _seats(self, frame: int) -> slice:
        start = TOKEN + frame * self._processes
        return slice(start, start + self._processes)


def _head(frames: int, processes: int) -> int:
    return -(-(TOKEN + frames * processes) // PAGE) * PAGE
