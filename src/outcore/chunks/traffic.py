"""Transfers under way between the host and the disk tier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from outcore.chunks.chunk import Chunk
from outcore.memory.disk import DiskTier

Done = Callable[[Chunk], None]


class Traffic:
    """Starts transfers and hears of their end. Is `outcore.chunks.core.Disk`.

    Args:
        lock: held by the caller of every method, and taken again before ``done`` is called.
        over: called under the lock at the end of each transfer, after ``done``.

    Attributes:
        count: transfers under way.
        leaving: bytes being written.
    """

    def __init__(self, disk: DiskTier, lock: threading.RLock, over: Callable[[], None]) -> None:
        self._disk = disk
        self._lock = lock
        self._over = over
        self.count = 0
        self.leaving = 0

    def allocate(self, chunk: Chunk) -> None:
        if chunk.extent is None:
            chunk.extent = self._disk.allocate(chunk.nbytes, chunk.name, chunk.kind.value)

    def free(self, chunk: Chunk) -> None:
        if chunk.extent is not None:
            self._disk.free(chunk.extent)
            chunk.extent = None

    def read(self, chunk: Chunk, done: Done) -> None:
        assert chunk.extent is not None
        self._watch(chunk, self._disk.read(chunk.extent, chunk.region.buffer), 0, done)

    def write(self, chunk: Chunk, done: Done) -> None:
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
                try:
                    done(chunk)
                finally:
                    self._over()

        future.add_done_callback(over)
