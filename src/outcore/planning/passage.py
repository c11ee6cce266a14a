"""What chunks on their way through a pool do to the disk and to computing: a measurement of ``outcore profile``.

[Note: Passage]
A step doesn't read a file from end to end. Chunks that were written a moment ago are read again while others leave for
them, in the size that chunks have, by the threads of the disk tier, into frames that go from one to the next; and
around each transfer the pool looks whom to read and whom to evict next. On a CPU that computes meanwhile, all of that
waits for cores and takes them. So it is measured with a pool that is too small for its chunks, also while the thread
that uses them computes in between, as it does in a step: little enough to wait for the disk, and enough not to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType

from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import Belady
from outcore.memory.disk import DiskTier
from outcore.memory.frames import Frames
from outcore.memory.ledger import Ledger
from outcore.memory.limits import DiskLimit
from outcore.trace.clock import Clock
from outcore.trace.schedule import Schedule

LAPS = 2
"""Laps before the first that counts: by then the order is on record and all chunks have been written."""


def _nothing() -> None:
    """Nothing is computed."""


class Passage:
    """Chunks that are changed one after the other, again and again, with room for half of them.

    Args:
        folder: on the disk.
        nbytes: of a chunk.
        count: chunks.

    Raises:
        TierError: the disk can't be used.
    """

    def __init__(self, folder: str | os.PathLike[str], nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._ledger = Ledger()
        limit = DiskLimit(os.path.abspath(os.fspath(folder)), 2 * count * nbytes)
        self._disk = DiskTier.open([limit], ledger=self._ledger)
        schedule = Schedule()
        self._pool = Pool(
            self._ledger, self._disk, count // 2 * nbytes, schedule, Belady(schedule), working=nbytes
        )
        self._clock = Clock(schedule, self._pool)
        frames = Frames()
        self._chunks = [Chunk(Kind.STATE, f"chunk {k}", frames.place(nbytes)) for k in range(count)]

    def __enter__(self) -> Passage:
        for chunk in self._chunks:
            with self._pool.guard([chunk], Access.FRESH):
                chunk.region.tensor.random_(0, 256)
        for _ in range(LAPS):
            self.lap()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
        self._disk.close()

    @property
    def moved(self) -> int:
        """Bytes read and written so far."""
        return sum(self._ledger.snapshot().moved.values())

    @property
    def waited(self) -> float:
        """Seconds that laps have waited for the disk so far."""
        return sum(self._ledger.snapshot().waited.values())

    @property
    def spent(self) -> float:
        """Processor seconds of the disk's threads so far."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in self._disk.threads if thread.ident]
        return sum(map(time.clock_gettime, clocks))

    def lap(self, work: Callable[[], object] = _nothing, times: int = 0) -> None:
        """Use each chunk once, as an update does, and compute something so many times after each."""
        self._clock.lap("lap")
        for number, chunk in enumerate(self._chunks):
            self._clock.tick(number, (chunk,))
            self._pool.guard([chunk], Access.WRITE).close()
            for _ in range(times):
                work()
