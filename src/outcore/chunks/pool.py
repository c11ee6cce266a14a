"""The pool: which chunks are on the host, under one budget, and guards as the only way to their bytes.

[Note: Who owns a byte]
A chunk's pages belong to the pool. A `Guard` borrows them: while it is open the chunk is pinned and
stays where it is, and when it closes the pool may take them back at any time. The pool starts every
transfer and I/O threads finish it; both only change a chunk's state under the pool's lock.

Where room for a chunk comes from is said in `outcore.chunks.room`. The pool is told when things are needed (`Order`)
and decides nothing about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from outcore.chunks.chunk import Chunk, Residence
from outcore.chunks.guards import Access, Guard, SideGuard
from outcore.chunks.holdings import Holdings
from outcore.chunks.lookahead import Lookahead
from outcore.chunks.refusal import too_small
from outcore.chunks.replacers import NEVER, Order, Replacer
from outcore.chunks.room import Room
from outcore.chunks.traffic import Traffic
from outcore.errors import StateError, TierError
from outcore.memory.disk import DiskTier
from outcore.memory.ledger import Ledger
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
        self._disk = disk
        self._order = order
        self._prefetch, self._working = prefetch, working
        self._holds_idle = True
        self._lock = threading.RLock()
        self._changed = Watchdog(self._lock, lambda: "" if disk is None else disk.stalled())
        self._ahead = Lookahead(order)
        self._held = Holdings(ledger, self._ahead.came, self._ahead.left)
        self._clock = self._beside = 0
        self._traffic = Traffic(disk, self._lock)
        self._room = Room(budget, self._held, self._traffic, replacer, self._begin_write, disk is not None)
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def lock(self) -> threading.RLock:
        """Held by whoever changes the `Order` while transfers are under way."""
        return self._lock

    @property
    def used(self) -> int:
        """Bytes the chunks hold on the host."""
        return self._held.used

    @property
    def pinned(self) -> int:
        """Bytes that are in use and can't leave: pinned chunks, and what was borrowed."""
        with self._lock:
            return self._held.pinned

    @property
    def warm(self) -> int:
        """Bytes of pages that hold nothing and stay for their next use; the first to go."""
        return self._held.warm

    @property
    def floor(self) -> int:
        """Bytes that were left for chunks where activations took the most so far."""
        return self._room.floor

    @property
    def ceiling(self) -> int:
        """Bytes the chunks may hold on the host now."""
        return self._room.ceiling

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set ``nbytes`` of the budget aside for what is not a chunk (activations, temporaries).

        Chunks above the new ceiling are evicted before this returns, as far as they are not pinned. What is
        read ahead stays clear of ``ahead`` bytes, which are needed soon.
        """
        with self._lock:
            self._room.reserve(nbytes, ahead)
            self._make_room()

    def hold_idle(self, on: bool) -> None:
        """Whether chunks may stay after their use. If not, each tick evicts what is not in use."""
        with self._lock:
            self._holds_idle = on
            if not on:
                self._trim()

    def _trim(self) -> None:
        """Evict all that is not in use, and wait until its bytes are given back.

        A write that is still under way holds its bytes: what is allocated meanwhile would come on top.
        """
        while self._held.cool():
            pass
        while True:
            for chunk in self._room.evictable():
                if chunk.residence is Residence.CLEAN:
                    self._held.give_back(chunk, Residence.DISK)
                else:
                    self._begin_write(chunk)
            leaving = any(chunk.pins == 0 and chunk.moving for chunk in self._held)
            if not leaving and not self._beside:
                return
            with self._ledger.waiting("disk write"):
                self._changed.wait()

    # -- guards -----------------------------------------------------------------------------------

    def guard(self, chunks: Iterable[Chunk], access: Access) -> Guard:
        """Bring chunks to the host and pin them; blocks until that is done (for writing, until no transfer uses them).

        Raises:
            BudgetError: they do not fit beside what is pinned already.
            TierError: a transfer failed; the chunks are as they were before the call.
        """
        wanted, overwritten = tuple(chunks), list[Chunk]()
        with self._lock:
            if self._closed:
                raise StateError("the engine behind this model was released")
            self._report_failure()
            for chunk in wanted:
                chunk.pins += 1
            try:
                for chunk in wanted:
                    self._bring(chunk, access, overwritten)
                for chunk in wanted:
                    self._settle(chunk, access)
            except BaseException:
                for chunk in overwritten:
                    if chunk.pins == 1:  # by this call alone: what is on disk is still what it held
                        self._held.give_back(chunk, Residence.DISK)
                self.unpin(wanted)
                raise
            self._clock += 1
            for chunk in wanted:
                chunk.last_use = self._clock
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
            if not self._enter(chunks, claim, beyond):
                self._changed.wait(WATCH)
                if not self._enter(chunks, claim, beyond):
                    return None
            guard = SideGuard(self, chunks)
            self._beside += 1
            try:
                while any(c.residence is Residence.READING for c in reads) or any(c.moving for c in writes):
                    self._changed.wait()
                for chunk in chunks:
                    if not chunk.on_host:
                        raise chunk.error or StateError("a chunk left while it was in use")
                for chunk in writes:
                    if chunk.residence is Residence.CLEAN:
                        chunk.move(Residence.DIRTY)
            except BaseException:
                guard.close()
                raise
            self._clock += 1
            for chunk in chunks:
                chunk.last_use = self._clock
            return guard

    def _enter(self, chunks: Sequence[Chunk], claim: Callable[[], bool], beyond: int) -> bool:
        """Pin chunks and start reading those that are on disk, if there is room and the claim is granted."""
        if self._closed or (beyond >= 0 and not self._holds_idle):
            return False
        distance = min(beyond, *(self._order.next_use(chunk) for chunk in chunks))
        entered = False
        for chunk in chunks:
            chunk.pins += 1  # none of them may make room for the others
        try:
            absent = [chunk for chunk in chunks if not chunk.on_host]
            ready = (
                (beyond < 0 or all(chunk.error is None for chunk in absent))
                and self._room.make(distance, newcomers=absent)
                and claim()
            )
            if ready:
                self._begin_reads(absent)
                entered = True
        finally:
            if not entered:
                for chunk in chunks:
                    chunk.pins -= 1
                self._room.offer(chunks)
        return entered

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._lock:
            self._changed.notify_all()

    def _bring(self, chunk: Chunk, access: Access, overwritten: list[Chunk]) -> None:
        """Start what must happen before the chunk can be used; what is not read back is noted."""
        chunk.error = None
        if not chunk.on_host:
            self._make_room(chunk)
        if chunk.on_host:  # making room waits, and others may have acted meanwhile
            return
        if chunk.residence is Residence.DISK and access is not Access.FRESH:
            self._begin_read(chunk)
            return
        if chunk.residence is Residence.DISK:
            overwritten.append(chunk)
        self._held.take(chunk, Residence.DIRTY)

    def _settle(self, chunk: Chunk, access: Access) -> None:
        """Wait until the chunk's bytes may be used as asked."""
        while not chunk.ready:
            if chunk.residence is Residence.READING:
                with self._ledger.waiting("disk read"):
                    self._changed.wait()
            elif chunk.error is not None and access is not Access.FRESH:
                raise chunk.error
            else:  # what could not be read is overwritten, and somebody may begin to read it meanwhile
                self._bring(chunk, access, [])
        if access is Access.READ:
            return
        if chunk.residence is Residence.WRITING:
            with self._ledger.waiting("disk write"):
                while chunk.residence is Residence.WRITING:
                    self._changed.wait()
        if chunk.residence is Residence.CLEAN:
            chunk.move(Residence.DIRTY)

    def unpin(self, chunks: Sequence[Chunk], beside: int = 0) -> None:
        with self._lock:
            self._beside -= beside
            for chunk in chunks:
                assert chunk.pins > 0, chunk.name
                chunk.pins -= 1
            self._room.offer(chunks)
            if self._held.used > self.ceiling:  # room was set aside while they could not leave
                try:
                    self._room.make()
                except TierError as error:
                    self._failure = error  # the next guard raises it
            self._changed.notify_all()
            self._pump()

    def discard(self, chunks: Iterable[Chunk]) -> None:
        """Forget the bytes of chunks that are not pinned: afterwards they are empty, on host and disk."""
        with self._lock:
            for chunk in chunks:
                while chunk.moving:
                    with self._ledger.waiting("disk write"):
                        self._changed.wait()
                assert chunk.pins == 0, chunk.name
                if chunk.on_host and self._holds_idle:
                    self._held.empty(chunk)
                elif chunk.on_host:
                    self._held.give_back(chunk, Residence.EMPTY)
                elif chunk.residence is Residence.DISK:
                    self._held.forget(chunk)
                if chunk.extent is not None and self._disk is not None:
                    self._disk.free(chunk.extent)
                    chunk.extent = None
            self._pump()

    def borrow(self, nbytes: int) -> None:
        """Make room for bytes that are not a chunk's, and count them until `repay`.

        Raises:
            BudgetError: they do not fit beside what is pinned.
        """
        with self._lock:
            self._make_room(nbytes=nbytes)
            self._held.borrow(nbytes)

    def borrow_ahead(self, nbytes: int, distance: int) -> bool:
        """The same for what is used in so many ticks, if what is needed sooner need not leave for it.

        Raises:
            TierError: the disk refused to take what would have to leave.
        """
        with self._lock:
            room = self.has_spare(nbytes) and self._room.make(distance, nbytes=nbytes, ahead=True)
            self._held.borrow(nbytes if room else 0)
            return room

    def has_spare(self, nbytes: int) -> bool:
        """Whether so many bytes may be held beside any use."""
        return self._prefetch and self._holds_idle and self.floor >= self._working + nbytes

    def repay(self, nbytes: int) -> None:
        """Give borrowed bytes back."""
        with self._lock:
            self._held.borrow(-nbytes)
            self._pump()

    # -- the future -------------------------------------------------------------------------------

    def advance(self, needs: Sequence[Chunk] = ()) -> None:
        """The clock of the `Order` moved: read ahead as far as there is room.

        ``needs`` is used now: what the `Order` foresees is its next use, but until then it stays.
        """
        with self._lock:
            self._room.needed = frozenset(needs)
            if self._holds_idle:
                self._pump()
            else:
                self._trim()

    def _pump(self) -> None:
        """Read ahead and write behind, as far as there is room."""
        if not self._prefetch or not self._holds_idle or self._closed or self._disk is None:
            return
        try:
            self._room.read_ahead(self._ahead, self._begin_read, self._working)
        except TierError as error:
            self._failure = error  # this may be an I/O thread: the next guard raises it

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, newcomer: Chunk | None = None, nbytes: int = 0) -> None:
        """Wait until there is room for a chunk, or for bytes; or until no more is held than may be."""
        newcomers = () if newcomer is None else (newcomer,)
        while not self._room.make(nbytes=nbytes, newcomers=newcomers):
            if newcomer is not None and newcomer.on_host:
                return
            if self._is_quiet():
                if newcomer is None and not nbytes:
                    return
                self._refuse(nbytes + self._held.missing(newcomers))
            with self._ledger.waiting("disk write"):
                self._changed.wait()

    def _is_quiet(self) -> bool:
        """Whether nothing is under way that will make room."""
        return self._traffic.count == 0 and self._beside == 0

    def _refuse(self, nbytes: int) -> None:
        self._report_failure()
        reserved, budget = self._room.reserved, self._room.budget
        held = sum(c.nbytes for c in self._held if c.pins)
        raise too_small(self._held.used + nbytes + reserved, budget, held, reserved, self._disk is not None)

    def _report_failure(self) -> None:
        """Raise what went wrong behind the caller's back: a failed write-back. Its bytes are still here."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            for chunk in self._held:
                chunk.error = None
            self._room.offer(self._held)
            raise failure

    # -- transfers --------------------------------------------------------------------------------

    def _begin_read(self, chunk: Chunk) -> None:
        self._begin_reads((chunk,))

    def _begin_reads(self, chunks: Sequence[Chunk]) -> None:
        """Read chunks for which there is room. All have theirs before the first read, which may be over at once."""
        for chunk in chunks:
            chunk.error = None
            self._held.take(chunk, Residence.READING)
        begun = 0
        try:
            for chunk in chunks:
                self._traffic.read(chunk, self._read_done)
                begun += 1
        except BaseException:
            for chunk in chunks[begun:]:
                self._held.give_back(chunk, Residence.DISK)
            raise

    def _read_done(self, chunk: Chunk) -> None:
        if chunk.error is None:
            chunk.move(Residence.CLEAN)
            self._room.offer((chunk,))
        else:
            self._held.give_back(chunk, Residence.DISK)
        self._changed.notify_all()
        self._pump()

    def _begin_write(self, chunk: Chunk) -> None:
        self._traffic.allocate(chunk)
        chunk.move(Residence.WRITING)
        try:
            self._traffic.write(chunk, self._write_done)
        except BaseException:
            chunk.move(Residence.DIRTY)
            raise

    def _write_done(self, chunk: Chunk) -> None:
        chunk.move(Residence.CLEAN if chunk.error is None else Residence.DIRTY)
        self._failure = self._failure or chunk.error
        crowded = self._held.used > self.ceiling or not self._holds_idle
        if chunk.residence is Residence.CLEAN and chunk.pins == 0 and crowded:
            self._held.give_back(chunk, Residence.DISK)
        self._room.offer((chunk,))
        self._changed.notify_all()
        self._pump()

    # -- the end ----------------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Wait until no transfer is under way."""
        with self._lock:
            while self._traffic.count:
                self._changed.wait()

    def close(self) -> None:
        """Wait for transfers and give every host byte back. The chunks' contents are lost."""
        with self._lock:
            self._closed = True
            self.quiesce()
            for chunk in list(self._held):
                chunk.residence = Residence.DIRTY  # whatever it was
                self._held.give_back(chunk, Residence.EMPTY)
            while self._held.cool():
                pass
