"""One file of the disk tier with the threads that serve it.

[Note: Who waits for whom]
I/O threads wait for the system and for work, for nothing else: they never run foreign code. Futures are
completed by one more thread, where callbacks run. So a caller that `Lane.submit` makes wait for room in the
queue of writes waits for the disk alone, and may hold any lock meanwhile, or be a callback itself.

[Note: Reads first]
The training waits for reads; writes only have to keep up. Each free thread takes the next piece of
the oldest read, but after `READS_PER_WRITE` of them in a row a piece of the oldest write, if there is one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import Future

import xxhash

from outcore.errors import CorruptionError, StateError
from outcore.memory import blocks, cores
from outcore.memory.blockfile import BlockFile
from outcore.memory.extents import Extent, Space
from outcore.memory.ledger import Ledger, Link
from outcore.memory.refusal import allocating
from outcore.memory.transfer import Completer, Transfer
from outcore.memory.watchdog import Watchdog

READS_PER_WRITE = 3
"""Pieces read in a row before a waiting write gets a turn."""

RATE_SAMPLE = 64 << 20
"""Bytes a lane must have moved before its speed counts."""


class Lane:
    """A file, its free space, its queues and its threads.

    Args:
        file: owned from now on; closed by the last thread that leaves.
        capacity: bytes the file may grow to.
        threads: requests under way at once.
        queue_bytes: writes wait in `submit` while more than this is queued.
        checksum: compute and verify digests.
        completer: told of transfers that are over.
    """

    def __init__(
        self,
        file: BlockFile,
        capacity: int,
        *,
        threads: int,
        request: int,
        queue_bytes: int,
        checksum: bool,
        ledger: Ledger,
        completer: Completer,
    ) -> None:
        self.file = file
        self.space = Space(capacity)
        self._request = request
        self._queue_bytes = queue_bytes
        self._checksum = checksum
        self._ledger = ledger
        self._completer = completer
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._room = Watchdog(self._lock, lambda: self._describe(next(iter(self._active))))
        self._reads: deque[Transfer] = deque()
        self._writes: deque[Transfer] = deque()
        self._reads_in_row = 0
        self._bytes_to_write = 0
        self._active: dict[Transfer, None] = {}
        self._moved = 0
        self._busy = 0.0
        self._busy_since = 0.0
        self._closed = False
        self._serving = threads
        self.threads = [
            threading.Thread(target=self._serve, name=f"outcore-disk-{k}", daemon=True)
            for k in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def rate(self) -> float:
        """Measured bytes per second while busy; 0 while too little has been moved to tell."""
        with self._lock:
            busy = self._busy + (time.perf_counter() - self._busy_since if self._active else 0.0)
            return self._moved / busy if self._moved >= RATE_SAMPLE and busy > 0 else 0.0

    # -- the callers' side ------------------------------------------------------------------------

    def submit(self, extent: Extent, view: memoryview, writing: bool) -> Future[None]:
        """Queue a transfer of a whole extent; a write may wait for room, see [Note: Who waits for whom].

        Raises:
            StateError: the extent is freed, in use in a way that conflicts, or was never written.
        """
        transfer = Transfer(extent, view, writing, self._request)
        with self._lock:
            if writing:
                self._wait_for_room(extent.nbytes)
            if self._closed:
                raise StateError("the disk tier is closed")
            self._claim(extent, writing)
            if writing:
                self._bytes_to_write += extent.nbytes
                self._writes.append(transfer)
            else:
                transfer.digests = list(extent._digests or ())
                self._reads.append(transfer)
            if not self._active:
                self._busy_since = time.perf_counter()
            self._active[transfer] = None
            self._work.notify(transfer.pieces)
        return transfer.future

    def _wait_for_room(self, nbytes: int) -> None:
        while not self._closed and self._bytes_to_write and self._bytes_to_write + nbytes > self._queue_bytes:
            self._room.wait()

    def _claim(self, extent: Extent, writing: bool) -> None:
        if extent._freed:
            raise StateError(f"{extent} has been freed")
        if extent._writing or (writing and extent._readers):
            raise StateError(f"{extent} still has a transfer under way: wait for its future first")
        if writing:
            extent._writing = True
            extent._digests = None  # until the write has succeeded the contents are undefined
        elif extent._digests is None:
            raise StateError(f"{extent} holds nothing: it was never written, or its last write failed")
        else:
            extent._readers += 1

    def retire(self, extent: Extent) -> None:
        """Forget an extent.

        Raises:
            StateError: it is in use, or freed already.
        """
        with self._lock:
            self._claim(extent, writing=True)
            extent._freed = True

    def oldest(self) -> tuple[float, str] | None:
        """When the transfer that has been under way for longest was asked for, and what it is, in words."""
        with self._lock:
            transfer = next(iter(self._active), None)
            return None if transfer is None else (transfer.since, self._describe(transfer))

    def _describe(self, transfer: Transfer) -> str:
        extent = transfer.extent
        what = f" of {extent.label}" if extent.label else ""
        kind = "write" if transfer.writing else "read"
        return (
            f"the {kind} of {extent.nbytes:,} bytes{what} at offset {extent.offset:,} of the swap file in "
            f"{self.file.name}"
        )

    def close(self) -> None:
        """Finish what is queued, then let the threads go. Does not wait for them."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._room.notify_all()

    # -- the threads' side ------------------------------------------------------------------------

    def _serve(self) -> None:
        cores.keep_to_node()  # where a page is first written is where it lies
        bounce = blocks.Bounce(self._request)
        while (piece := self._take()) is not None:
            error: BaseException | None = None
            try:
                self._move(*piece, bounce)
            except BaseException as caught:
                error = caught
            self._finish(*piece, error)
            del piece, error  # an idle thread keeps no buffer alive
        with self._lock:
            self._serving -= 1
            last = self._serving == 0
        if last:
            with contextlib.suppress(OSError):  # nobody will read the file again
                self.file.close()

    def _take(self) -> tuple[Transfer, int] | None:
        with self._lock:
            while not self._reads and not self._writes:
                if self._closed:
                    return None
                self._work.wait()
            writing = not self._reads or (bool(self._writes) and self._reads_in_row >= READS_PER_WRITE)
            self._reads_in_row = 0 if writing else self._reads_in_row + 1
            queue = self._writes if writing else self._reads
            transfer = queue[0]
            index = transfer.following
            if index == 0:
                transfer.began = self._ledger.mark()
            transfer.following += 1
            transfer.running += 1
            if transfer.following == transfer.pieces:
                queue.popleft()
            return transfer, index

    @allocating("a transfer")
    def _move(self, transfer: Transfer, index: int, bounce: blocks.Bounce) -> None:
        start = index * self._request
        view = transfer.view[start : start + self._request]
        offset = transfer.extent.offset + start
        if transfer.writing:
            if self._checksum:
                transfer.digests[index] = xxhash.xxh3_64_intdigest(view)
            blocks.write(self.file, view, offset, bounce)
        else:
            blocks.read(self.file, view, offset, bounce)
            if self._checksum and xxhash.xxh3_64_intdigest(view) != transfer.digests[index]:
                raise CorruptionError(
                    f"{len(view):,} bytes read at offset {offset:,} of the swap file in {self.file.name} are "
                    f"not those that were written there ({transfer.extent}): the disk, its driver or its "
                    "memory is faulty"
                )
        self._ledger.moved("disk write" if transfer.writing else "disk read", len(view))

    def _finish(self, transfer: Transfer, index: int, error: BaseException | None) -> None:
        nbytes = transfer.size(index)
        with self._lock:
            transfer.running -= 1
            if error is None:
                self._moved += nbytes
            if error is not None and transfer.error is None:
                transfer.error = error
                if transfer.following < transfer.pieces:
                    (self._writes if transfer.writing else self._reads).remove(transfer)
                nbytes += transfer.abandon()
            if transfer.writing:
                self._bytes_to_write -= nbytes
                self._room.notify_all()
            if transfer.over:
                self._complete(transfer)

    def _complete(self, transfer: Transfer) -> None:
        extent = transfer.extent
        if transfer.writing:
            extent._writing = False
            if transfer.error is None:
                extent._digests = transfer.digests
        else:
            extent._readers -= 1
        link: Link = "disk write" if transfer.writing else "disk read"
        self._ledger.span(link, extent.label, transfer.began, extent.nbytes)
        del self._active[transfer]
        if not self._active:
            self._busy += time.perf_counter() - self._busy_since
        self._completer.put(transfer)
