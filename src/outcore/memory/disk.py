"""The disk tier: extents in private files, read and written by threads, every byte checked.

What the file is and what is checked is described in ``docs/swap.md``. The tier decides nothing: who
is evicted, and when something is read, is the business of the rooms above.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from outcore.errors import DiskFullError, StateError, TierError, UsageError
from outcore.memory.blockfile import BLOCK, BlockFile, open_files
from outcore.memory.blocks import failure
from outcore.memory.extents import Extent, blocks
from outcore.memory.lane import Lane
from outcore.memory.ledger import OTHER, Ledger
from outcore.memory.limits import DiskLimit
from outcore.memory.transfer import Completer

__all__ = ["DiskTier", "Extent"]


class DiskTier:
    """Extents on one or several files. Thread-safe. A context manager.

    Futures resolve to ``None``, or to a `TierError`. Their callbacks run one after the other on a thread of
    the tier's own: they must be short, and may call `allocate`, `free`, `read` and `write`, but neither
    `close` nor anything that waits for another future.

    Several files share the extents: each new one goes where it will be done soonest, by what is there
    already and by the measured speed of each file.

    Args:
        files: directories, for a private file in each, or files, which the tier owns from now on.
        ledger: told of every byte held and moved.
        budget: bytes each file may take, one number for all or one for each.
        threads: requests under way at once, per file.
        request_bytes: larger transfers are cut into requests of this size; a multiple of 4096.
        queue_bytes: `write` waits while more than this waits to be written to its file.
        checksum: compute and verify digests; without them only errors that the system reports are found.

    Raises:
        UsageError: no file, or a number that has no meaning.
        OSError: a directory can't be written.
    """

    @classmethod
    def open(cls, limits: Sequence[DiskLimit], *, ledger: Ledger) -> DiskTier:
        """A tier on the directories of a budget, within their limits."""
        return cls([place.path for place in limits], ledger=ledger, budget=[place.nbytes for place in limits])

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str] | BlockFile],
        *,
        ledger: Ledger,
        budget: int | Sequence[int],
        threads: int = 6,
        request_bytes: int = 4 << 20,
        queue_bytes: int = 256 << 20,
        checksum: bool = True,
    ) -> None:
        budgets = [budget] * len(files) if isinstance(budget, int) else list(budget)
        if not files or len(budgets) != len(files) or min(budgets) <= 0:
            raise UsageError(f"{len(files)} files with budgets {budgets}: one above zero for each is needed")
        if threads < 1 or request_bytes < BLOCK or request_bytes % BLOCK:
            raise UsageError(f"{threads} threads with requests of {request_bytes} bytes: can't serve a disk")
        opened = open_files(files)
        self._ledger = ledger
        self._lock = threading.RLock()
        self._closed = False
        self._completer = Completer()
        self._lengths = [0] * len(files)
        self._lanes = [
            Lane(
                file,
                nbytes,
                threads=threads,
                request=request_bytes,
                queue_bytes=queue_bytes,
                checksum=checksum,
                ledger=ledger,
                completer=self._completer,
            )
            for file, nbytes in zip(opened, budgets, strict=True)
        ]
        self._shut = weakref.finalize(self, _shut, self._lanes, self._completer)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the disk tier is closed")

    # -- space ------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """Bytes the tier may hold, over all files."""
        return sum(lane.space.capacity for lane in self._lanes)

    @property
    def used(self) -> int:
        """Bytes of the extents that are allocated, in whole blocks."""
        return sum(lane.space.used for lane in self._lanes)

    def allocate(self, nbytes: int, label: str = "", kind: str = OTHER) -> Extent:
        """A place for ``nbytes`` bytes; ``label`` says in messages and reports what they are, ``kind`` in the ledger.

        Raises:
            DiskFullError: no room within the budget, or on the device.
            DiskWriteError: a file can't grow for another reason.
        """
        if nbytes <= 0:
            raise UsageError(f"an extent of {nbytes} bytes has no meaning")
        space = blocks(nbytes)
        refusal: TierError | None = None
        with self._lock:
            self._check_open()
            for index in self._by_speed(space):
                lane = self._lanes[index]
                offset = lane.space.take(space)
                if offset is None:
                    continue
                try:
                    self._grow(index, offset + space)
                except OSError as error:
                    lane.space.give(offset, space)
                    length = self._lengths[index]
                    refusal = failure(error, "growth", lane.file, length, offset + space - length, 0)
                    continue
                self._ledger.hold("disk", space, kind)
                return Extent(nbytes, offset, index, label=label, kind=kind)
            raise refusal or self._full(space)

    def free(self, extent: Extent) -> None:
        """Give an extent back. Its space serves the next one; the file keeps it.

        After `close` everything has been given back, and nothing is done.

        Raises:
            StateError: a transfer of it is under way, or it is freed already.
        """
        with self._lock:
            if self._closed:
                return
            lane = self._lanes[extent.lane]
            lane.retire(extent)
            lane.space.give(extent.offset, extent.space)
            self._ledger.hold("disk", -extent.space, extent.kind)

    def _by_speed(self, space: int) -> list[int]:
        """Files by the time it would take to move all that is on them and ``space`` bytes more."""
        rates = [lane.rate for lane in self._lanes]
        if not all(rates):
            rates = [1.0] * len(rates)
        costs = [(lane.space.used + space) / rate for lane, rate in zip(self._lanes, rates, strict=True)]
        return sorted(range(len(costs)), key=costs.__getitem__)

    def _grow(self, index: int, nbytes: int) -> None:
        if nbytes > self._lengths[index]:
            self._lanes[index].file.extend(nbytes)
            self._lengths[index] = nbytes

    def _full(self, space: int) -> DiskFullError:
        left = self.budget - self.used
        largest = max(lane.space.largest for lane in self._lanes)
        where = ", ".join(lane.file.name for lane in self._lanes)
        return DiskFullError(
            f"the disk budget of {self.budget:,} bytes in {where} is used up: {space:,} bytes are needed, "
            f"{left:,} are left, {largest:,} of them in one piece; give the disk at least {space - largest:,}"
            " bytes more, or the host more so that less has to leave it"
        )

    @property
    def threads(self) -> Sequence[threading.Thread]:
        """All that serve it."""
        return [thread for lane in self._lanes for thread in lane.threads] + [self._completer.thread]

    # -- transfers --------------------------------------------------------------------------------

    def stalled(self) -> str:
        """The transfer that has been under way for longest, in words; nothing if there is none."""
        found = [transfer for lane in self._lanes if (transfer := lane.oldest()) is not None]
        return min(found)[1] if found else ""

    def read(self, extent: Extent, into: memoryview) -> Future[None]:
        """Fill ``into``, of `Extent.nbytes` bytes, with what was written last; directly if page-aligned.

        Nobody may touch it until the future is done. After an error its contents are undefined.

        Raises (the future):
            DiskReadError: the system reports an error or the transfer stops short.
            CorruptionError: the bytes are not those that were written.

        Raises:
            StateError: nothing was written there, or a write is under way.
        """
        view = _flat(extent, into)
        if view.readonly:
            raise UsageError("can't read into memory that is read-only")
        return self._lanes[extent.lane].submit(extent, view, writing=False)

    def write(self, extent: Extent, data: memoryview) -> Future[None]:
        """Write ``data``, of `Extent.nbytes` bytes, over what was there. It must not change until done.

        Waits while more than ``queue_bytes`` are queued: for the disk alone, so any lock may be held.

        Raises (the future):
            DiskFullError: no space left on the device.
            DiskWriteError: the system reports an error or the transfer stops short.

        Raises:
            StateError: another transfer of this extent is under way.
        """
        return self._lanes[extent.lane].submit(extent, _flat(extent, data), writing=True)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all transfers, join the threads and give the files back. Idempotent.

        Raises:
            StateError: called from a callback, which would wait for itself.
        """
        if threading.current_thread() is self._completer.thread:
            raise StateError("a callback can't close the disk tier: it would wait for itself")
        with self._lock:
            first, self._closed = not self._closed, True
        self._shut()
        if first:
            self._ledger.clear("disk")

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _flat(extent: Extent, view: memoryview) -> memoryview:
    if not view.contiguous or view.nbytes != extent.nbytes:
        raise UsageError(f"{extent} needs {extent.nbytes:,} contiguous bytes, not {view.nbytes:,}")
    return view.cast("B")


def _shut(lanes: list[Lane], completer: Completer) -> None:
    """Runs once: by `DiskTier.close`, when the tier is collected, or at exit."""
    here = threading.current_thread()  # the collector may run on a thread of the tier's own
    for lane in lanes:
        lane.close()
    for lane in lanes:
        for thread in lane.threads:
            if thread is not here:
                thread.join()
    completer.close()
    if completer.thread is not here:
        completer.thread.join()
