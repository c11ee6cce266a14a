"""Whole transfers out of single attempts: continued when short, always aligned, with typed errors."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable

import numpy as np

from outcore.errors import DiskFullError, DiskReadError, DiskWriteError, TierError
from outcore.memory.blockfile import BLOCK, BlockFile
from outcore.memory.extents import blocks

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Bounce:
    """An aligned buffer for bytes whose address or length is not; one per thread, made when first needed."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._view: memoryview | None = None

    def view(self, nbytes: int) -> memoryview:
        if self._view is None:
            self._view = memoryview(mmap.mmap(-1, self._nbytes))
        return self._view[:nbytes]


def read(file: BlockFile, into: memoryview, offset: int, bounce: Bounce) -> None:
    """Fill ``into`` from ``offset``, reading up to the end of its last block.

    Raises:
        DiskReadError: the system reports an error, or the transfer stops short.
    """
    direct = aligned(into)
    _whole(file.pread, "read", file, into[:direct], offset)
    rest = into[direct:]
    if rest:
        buffer = bounce.view(blocks(len(rest)))
        _whole(file.pread, "read", file, buffer, offset + direct)
        rest[:] = buffer[: len(rest)]


def write(file: BlockFile, data: memoryview, offset: int, bounce: Bounce) -> None:
    """Write ``data`` at ``offset``, with zeros up to the end of its last block.

    Raises:
        DiskFullError: no space left on the device.
        DiskWriteError: the system reports another error, or the transfer stops short.
    """
    direct = aligned(data)
    _whole(file.pwrite, "write", file, data[:direct], offset)
    rest = data[direct:]
    if rest:
        buffer = bounce.view(blocks(len(rest)))
        buffer[: len(rest)] = rest
        buffer[len(rest) :] = bytes(len(buffer) - len(rest))
        _whole(file.pwrite, "write", file, buffer, offset + direct)


def aligned(view: memoryview) -> int:
    """How many bytes from the start can be transferred where they are."""
    if len(view) < BLOCK or np.frombuffer(view, np.uint8).ctypes.data % BLOCK:
        return 0
    return len(view) // BLOCK * BLOCK


def _whole(
    attempt: Callable[[memoryview, int], int], verb: str, file: BlockFile, view: memoryview, offset: int
) -> None:
    done = 0
    while done < len(view):
        try:
            moved = attempt(view[done:], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise failure(error, verb, file, offset, len(view), done) from error
        progress = moved // BLOCK * BLOCK  # a part of a block is moved again: the next offset must be aligned
        if progress <= 0:
            raise failure(None, verb, file, offset, len(view), done + moved)
        done += progress


def failure(
    error: OSError | None, verb: str, file: BlockFile, offset: int, asked: int, got: int
) -> TierError:
    """The typed error for a transfer that stopped; ``error`` is what the system said, if anything."""
    code = error.errno if error is not None and error.errno else errno.EIO
    reason = "it stopped short" if error is None else (error.strerror or str(error))
    where = f"{verb} of {asked:,} bytes at offset {offset:,} of the swap file in {file.name}"
    message = f"{where}: {reason} after {got:,} bytes"
    if verb == "read":
        return DiskReadError(code, message)
    if code in _FULL:
        return DiskFullError(code, f"{message}; free space there, or give the run another disk")
    return DiskWriteError(code, message)
