"""Host memory at addresses that never change, whose bytes come and go.

[Note: Stable addresses]
A parameter that leaves the host must give its bytes back while views of it live on: autograd saves
them in forward and reads them in backward. Freeing a storage or swapping ``.data`` breaks those views
or leaves stale bytes alive. So a region keeps its addresses for life and gives back only the
pages behind them: `Region.release` is ``madvise(MADV_DONTNEED)``, and the next touch, or a read from disk
straight into `Region.buffer`, brings pages again. Every view sees the new bytes, no version
counter moves, and gradients are bit-equal to those of a run that never let go.

[Note: Huge pages]
Direct reads into small pages are bound by the pages: a disk that gave 3.7 GB/s into huge pages gave 1.7 into
small ones, and 1.3 where they had to be found and cleared first (2.8 if huge). So regions ask for huge pages,
but only inside: the page in which a region or a slice begins or ends stays small, so that touching
one slice takes no memory beyond it and releasing it gives all of it back. Starts are aligned for this.

Addresses are reserved without claiming swap space (``MAP_NORESERVE``), so reserving far more than the machine
has is fine as long as no more than the budget is touched at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
from pathlib import Path

import torch

from outcore.errors import TierError, UsageError

PAGE: int = mmap.PAGESIZE
"""Bytes of a page. Offsets of slices are multiples of it."""

_NORESERVE_ELSEWHERE = ("mips", "ppc", "sparc", "alpha", "parisc", "xtensa")
"""Architectures whose Linux uses another number for MAP_NORESERVE than the common 0x4000."""


def _flags() -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if hasattr(mmap, "MAP_NORESERVE"):  # Python 3.13
        return flags | int(mmap.MAP_NORESERVE)
    if sys.platform == "linux" and not platform.machine().startswith(_NORESERVE_ELSEWHERE):
        return flags | 0x4000
    return flags


def _huge_page() -> int:
    """Bytes of a huge page; 0 where there are none, or they are so large that they would splinter memory."""
    try:
        size = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if size <= 4 << 20 else 0


_HUGE = _huge_page()


class Region:
    """Pages of an anonymous mapping. Page aligned; the addresses never move.

    The mapping lives as long as any region, tensor or buffer of it and is unmapped when the last one goes.

    Attributes:
        tensor: the bytes, shape [nbytes], uint8.
    """

    __slots__ = ("_mapping", "_offset", "tensor")

    def __init__(self, mapping: mmap.mmap, tensor: torch.Tensor, offset: int) -> None:
        self._mapping = mapping
        self._offset = offset
        self.tensor = tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.numel()

    @property
    def buffer(self) -> memoryview:
        """The bytes as something to read into and write from."""
        return memoryview(self._mapping)[self._offset : self._offset + self.nbytes]

    def release(self) -> None:
        """Give the pages back. The bytes read as zeros until they are written again."""
        whole = self.nbytes // PAGE * PAGE
        if whole < self.nbytes:  # the last page is shared with what lies behind
            self.tensor[whole:].zero_()
        if whole == 0:
            return
        if sys.platform == "linux":
            self._mapping.madvise(mmap.MADV_DONTNEED, self._offset, whole)
        else:  # elsewhere DONTNEED may keep the old bytes; FREE keeps either these zeros or gives new ones
            self.tensor[:whole].zero_()
            self._mapping.madvise(mmap.MADV_FREE, self._offset, whole)

    def end_at(self, nbytes: int) -> None:
        """Give back the pages behind the first ``nbytes``, and see to it that touching those takes no more."""
        end = -(-nbytes // PAGE) * PAGE
        if end < self.nbytes:
            self._keep_small(end)
            Region(self._mapping, self.tensor[end:], self._offset + end).release()

    def slice(self, offset: int, nbytes: int) -> Region:
        """The part of ``nbytes`` bytes at ``offset``, sharing the memory.

        Raises:
            UsageError: ``offset`` is not a multiple of `PAGE`, or the part is not inside.
        """
        if offset % PAGE or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise UsageError(
                f"no slice of {nbytes} bytes at {offset}: it must lie inside {self.nbytes} bytes and start "
                f"at a multiple of {PAGE}"
            )
        for edge in (offset, offset + nbytes):
            self._keep_small(edge)
        return Region(self._mapping, self.tensor[offset : offset + nbytes], self._offset + offset)

    def _keep_small(self, edge: int) -> None:
        """No huge page across an edge within the region; see [Note: Huge pages]."""
        address = self.tensor.data_ptr() + edge
        if _HUGE and address % _HUGE:
            start = max(0, self._offset + edge - address % _HUGE)
            length = min(_HUGE, len(self._mapping) - start)
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE, start, length)


def reserve(nbytes: int) -> Region:
    """New addresses for ``nbytes`` bytes, rounded up to whole pages (at least one). Reads as zeros.

    Takes no memory until touched.

    Raises:
        UsageError: ``nbytes`` is negative.
        TierError: the system refused (address space or data limit).
    """
    if nbytes < 0:
        raise UsageError(f"can't reserve {nbytes} bytes")
    size = -(-max(nbytes, 1) // PAGE) * PAGE
    huge = _HUGE if size >= _HUGE else 0
    try:
        mapping = mmap.mmap(-1, size + huge, _flags())
    except (OSError, OverflowError) as error:
        raise TierError(
            f"the system refused {size:,} bytes of host addresses ({error}); raise the limit of this process "
            "(ulimit -v, ulimit -d) or use a smaller model"
        ) from error
    start = 0
    if huge:
        start = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % huge
        with contextlib.suppress(OSError):  # a system without them
            mapping.madvise(mmap.MADV_HUGEPAGE, start, size // huge * huge)
    return Region(mapping, torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start), start)
