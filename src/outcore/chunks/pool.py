"""The pool: which chunks are on the host, under one budget, and guards as the only way to their bytes.

[Note: Who owns a byte]
A chunk's pages belong to the pool. A `Guard` borrows them: while it is open the chunk is pinned and
stays where it is, and when it closes the pool may take them back at any time. The pool starts every
transfer and I/O threads finish it; both only change a chunk's state under the pool's lock.

What is done when is said in `outcore.chunks.core`. Here are the lock, and how a thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from outcore.chunks.chunk import Chunk
from outcore.chunks.core import Core
from outcore.chunks.guards import Access, Guard, SideGuard
from outcore.chunks.refusal import too_small
from outcore.chunks.replacers import NEVER, Order, Replacer
from outcore.chunks.traffic import Traffic
from outcore.errors import StateError
from outcore.memory.disk import DiskTier
from outcore.memory.ledger import Ledger, Link
from outcore.memory.watchdog import Watchdog

__all__ = ["Access", "Guard", "Pool"]

WATCH = 0.5
"""Seconds after which a thread that waits for room looks whether it is still wanted."""


class Pool:
    """Chunks on the host over chunks on disk.

    Args:
        ledger: where held bytes and waits are written.
        disk: the tier below, or ``None`` when everything must stay on the host.
        budget: the most bytes the chunks may hold on the host, less what `reserve` sets aside.
        order: the expected order of uses.
        replacer: the eviction policy.
        prefetch: whether to read ahead of use.
        working: the most bytes that one use needs; what is borrowed ahead of another leaves them.
    """

    def __init__(
        self,
        ledger: Ledger,
        disk: DiskTier | None,
        budget: int,
        order: Order,
        replacer: Replacer,
        prefetch: bool = True,
        working: int = 0,
    ) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()
        self._changed = Watchdog(self._lock, lambda: "" if disk is None else disk.stalled())
        below = None if disk is None else Traffic(disk, self._lock, self._changed.notify_all)
        self._below = below
        self._core = Core(ledger, below, self, budget, order, replacer, prefetch, working)

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever changes the `Order` while transfers are under way."""
        return self._lock

    @property
    def used(self) -> int:
        """Bytes the chunks hold on the host."""
        return self._core.held.used

    @property
    def pinned(self) -> int:
        """Bytes that are in use and can't leave: pinned chunks, and what was borrowed."""
        with self._lock:
            return self._core.held.pinned

    @property
    def warm(self) -> int:
        """Bytes of pages that hold nothing and stay for their next use; the first to go."""
        return self._core.held.warm

    @property
    def floor(self) -> int:
        """Bytes that were left for chunks where activations took the most so far."""
        return self._core.room.floor

    @property
    def ceiling(self) -> int:
        """Bytes the chunks may hold on the host now."""
        return self._core.room.ceiling

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set ``nbytes`` of the budget aside for what is not a chunk (activations, temporaries).

        Chunks above the new ceiling are evicted before this returns, as far as they are not pinned. What is
        read ahead stays clear of ``ahead`` bytes, which are needed soon.
        """
        with self._lock:
            self._core.reserve(nbytes, ahead)

    def hold_idle(self, on: bool) -> None:
        """Whether chunks may stay after their use. If not, each tick evicts what is not in use."""
        with self._lock:
            self._core.hold_idle(on)

    # -- guards -----------------------------------------------------------------------------------

    def guard(self, chunks: Iterable[Chunk], access: Access) -> Guard:
        """Bring chunks to the host and pin them; blocks until that is done (for writing, until no transfer uses them).

        Raises:
            BudgetError: they do not fit beside what is pinned already.
            TierError: a transfer failed; the chunks are as they were before the call.
        """
        wanted = tuple(chunks)
        with self._lock:
            if self._core.closed:
                raise StateError("the engine behind this model was released")
            self._core.acquire(wanted, access)
        return Guard(self, wanted)

    def guard_if_room(
        self, reads: Sequence[Chunk], writes: Sequence[Chunk], claim: Callable[[], bool], beyond: int = NEVER
    ) -> Guard | None:
        """Guard chunks for a thread beside the one that trains: for reading, and for writing.

        Room is taken only from what is needed later than they are (or than ``beyond`` ticks, if that is sooner; below
        0, where nobody trains, as `guard` takes it), and waited for holding nothing, so the training thread never finds
        less than it would alone. ``claim`` is called when there is room, before anything is held. ``None`` if it
        refuses, or if there is no room for a while.

        Raises:
            TierError: a read failed.
        """
        chunks = (*reads, *writes)
        with self._lock:
            if not self._core.enter(chunks, beyond, claim):
                self._changed.wait(WATCH)
                if not self._core.enter(chunks, beyond, claim):
                    return None
            guard = SideGuard(self, chunks)
            try:
                while not self._core.arrived(reads, writes):
                    self._changed.wait()
                for chunk in chunks:
                    if not chunk.on_host:
                        raise chunk.error or StateError("a chunk left while it was in use")
                self._core.touch(chunks, writes)
            except BaseException:
                guard.close()
                raise
            return guard

    def unpin(self, chunks: Sequence[Chunk], beside: int = 0) -> None:
        with self._lock:
            self._core.unpin(chunks, beside)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._lock:
            self._changed.notify_all()

    def discard(self, chunks: Iterable[Chunk]) -> None:
        """Forget the bytes of chunks that are not pinned: afterwards they are empty, on host and disk."""
        with self._lock:
            self._core.discard(chunks)

    # -- bytes that are not a chunk's ---------------------------------------------------------------

    def borrow(self, nbytes: int) -> None:
        """Make room for bytes that are not a chunk's, and count them until `repay`.

        Raises:
            BudgetError: they do not fit beside what is pinned.
        """
        with self._lock:
            self._core.borrow(nbytes)

    def borrow_ahead(self, nbytes: int, distance: int) -> bool:
        """The same for what is used in so many ticks, if what is needed sooner need not leave for it.

        Raises:
            TierError: the disk refused to take what would have to leave.
        """
        with self._lock:
            return self._core.borrow_ahead(nbytes, distance)

    def make_ahead(self, nbytes: int, distance: int) -> None:
        """Begin to make room for bytes that come in so many ticks, of what is used later.

        Raises:
            TierError: the disk refused to take what would have to leave.
        """
        with self._lock:
            self._core.make_ahead(nbytes, distance)

    def has_spare(self, nbytes: int) -> bool:
        """Whether so many bytes may be held beside any use."""
        return self._core.has_spare(nbytes)

    def repay(self, nbytes: int) -> None:
        """Give borrowed bytes back."""
        with self._lock:
            self._core.repay(nbytes)

    # -- the future -------------------------------------------------------------------------------

    def advance(self, needs: Sequence[Chunk] = ()) -> None:
        """The clock of the `Order` moved: read ahead as far as there is room.

        ``needs`` is used now: what the `Order` foresees is its next use, but until then it stays.
        """
        with self._lock:
            self._core.advance(needs)

    # -- waiting ----------------------------------------------------------------------------------

    def wait(self, what: Link) -> None:
        with self._ledger.waiting(what):
            self._changed.wait()

    def refuse(self, needed: int) -> NoReturn:
        held, room = self._core.held, self._core.room
        pinned = sum(chunk.nbytes for chunk in held if chunk.pins)
        raise too_small(needed, room.budget, pinned, room.reserved, self._below is not None)

    # -- the end ----------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Wait until no transfer is under way."""
        with self._lock:
            while self._below is not None and self._below.count:
                self._changed.wait()

    def close(self) -> None:
        """Wait for transfers and give every host byte back. The chunks' contents are lost."""
        with self._lock:
            self._core.closed = True
            self.quiesce()
            self._core.empty()
