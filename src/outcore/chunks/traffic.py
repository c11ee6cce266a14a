"""Transfers under way between the host and the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from outcore.chunks.chunk import Chunk
from outcore.memory.disk import DiskTier

Done = Callable[[Chunk], None]


class Traffic:
    """Starts transfers and hears of their end. Its fields change under the pool's lock alone.

    Args:
        lock: held by the caller of every method, and taken again before ``done`` is called.

    Attributes:
        count: transfers under way.
        leaving: bytes being written.
    """

    def __init__(self, disk: DiskTier | None, lock: threading.RLock) -> None:
        self._disk = disk
        self._lock = lock
        self.count = 0
        self.leaving = 0

    def allocate(self, chunk: Chunk) -> None:
        """Give the chunk a place on disk, if it has none."""
        assert self._disk is not None
        if chunk.extent is None:
            chunk.extent = self._disk.allocate(chunk.nbytes, chunk.name, chunk.kind.value)

    def read(self, chunk: Chunk, done: Done) -> None:
        """Read a chunk; ``done`` finds what went wrong in ``chunk.error``. If this raises, nothing was begun."""
        assert self._disk is not None
        assert chunk.extent is not None
        self._watch(chunk, self._disk.read(chunk.extent, chunk.region.buffer), 0, done)

    def write(self, chunk: Chunk, done: Done) -> None:
        """Write a chunk, likewise."""
        assert self._disk is not None
        assert chunk.extent is not None
        self._watch(chunk, self._disk.write(chunk.extent, chunk.region.buffer), chunk.nbytes, done)

    def _watch(self, chunk: Chunk, future: Future[None], leaving: int, done: Done) -> None:
        self.count += 1
        self.leaving += leaving

        def over(future: Future[None]) -> None:
            with self._lock:
                self.count -= 1
                self.leaving -= leaving
                chunk.error = future.exception()
                done(chunk)

        future.add_done_callback(over)
