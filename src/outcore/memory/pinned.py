"""Page-locked host memory, which an accelerator reads and writes without stopping the host.

Chunks that cross the link to an accelerator live here. Nothing aliases them between uses, so unlike on
the CPU (see `outcore.memory.host`) their addresses may change: released memory goes to a free list by
size and serves the next chunk of that size. Locking pages is slow, giving them back is slow, and both may synchronise
the device; so memory is only given back when another size needs the room.
"""

from __future__ import annotations

import threading
import warnings

import torch


class PinnedMemory:
    """Hands out regions within a limit of locked bytes.

    Args:
        limit: bytes that may be locked, in use and idle together.
        locks: pages are locked; of no use to a device that copies while the host waits.
    """

    def __init__(self, limit: int, locks: bool = True) -> None:
        self._limit = limit
        self._locks = locks
        self._idle: dict[int, list[torch.Tensor]] = {}
        self._locked = 0
        self._lock = threading.Lock()
        self._warned = False

    def region(self, nbytes: int) -> PinnedRegion:
        """A region that takes memory when first used, and again after each release."""
        return PinnedRegion(self, nbytes)

    def take(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of locked memory, with any content."""
        with self._lock:
            idle = self._idle.get(nbytes)
            if idle:
                return idle.pop()
            if self._locked + nbytes > self._limit:
                self._give_back(nbytes)
            self._locked += nbytes
        try:
            return self._allocate(nbytes)
        except BaseException:
            with self._lock:
                self._locked -= nbytes
            raise

    def put(self, memory: torch.Tensor) -> None:
        """Memory that is not used any more, neither by the host nor by a copy."""
        with self._lock:
            self._idle.setdefault(memory.numel(), []).append(memory)

    def _give_back(self, wanted: int) -> None:
        freed = 0
        for size, idle in self._idle.items():
            while idle and freed < wanted:
                idle.pop()
                freed += size
        self._locked -= freed

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if not self._locks:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"host memory can't be page-locked ({error}): copies to the device will be slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return torch.empty(nbytes, dtype=torch.uint8)


class PinnedRegion:
    """``nbytes`` of locked memory while in use. Behaves as `outcore.memory.host.Region`."""

    def __init__(self, memory: PinnedMemory, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = memory
        self._bytes: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, shape [nbytes], uint8; zeros when first used after a release."""
        if self._bytes is None:
            self._bytes = self._memory.take(self.nbytes).zero_()
        return self._bytes

    @property
    def buffer(self) -> memoryview:
        """The bytes as something to read into; not cleared after a release."""
        if self._bytes is None:
            self._bytes = self._memory.take(self.nbytes)
        return memoryview(self._bytes.numpy())  # type: ignore[arg-type]  # arrays have a buffer

    def release(self) -> None:
        """Give the bytes back."""
        if self._bytes is not None:
            self._memory.put(self._bytes)
            self._bytes = None
