"""What a pool does when: which state each chunk goes to, what is waited for, and what is begun meanwhile.

[Note: One flow, two worlds]
A run and its plan must do the same things in the same order, or the plan is of something else. So all of it is
written once, here, without a clock, a lock or a thread. `outcore.chunks.pool` runs it over a real disk, under a lock; a
plan (`outcore.planning.cache`) over one that takes time on a virtual clock and moves nothing. What differs between the
two is a `Disk`, which begins transfers and tells the core of their end, and the `Waiting` for it.

Where room for a chunk comes from is said in `outcore.chunks.room`. The core is told when things are needed (`Order`)
and decides nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, Protocol

from outcore.chunks.chunk import Chunk, Residence
from outcore.chunks.guards import Access
from outcore.chunks.holdings import Holdings
from outcore.chunks.lookahead import Lookahead
from outcore.chunks.replacers import Order, Replacer
from outcore.chunks.room import Room
from outcore.errors import TierError
from outcore.memory.ledger import Ledger, Link


class Disk(Protocol):
    """Where chunks that leave the host go. Of each transfer that was begun it tells the core the end.

    Attributes:
        count: transfers under way.
        leaving: bytes being written.
    """

    @property
    def count(self) -> int: ...

    @property
    def leaving(self) -> int: ...

    def allocate(self, chunk: Chunk) -> None:
        """Give the chunk a place, if it has none.

        Raises:
            TierError, BudgetError: there is no room for it.
        """

    def free(self, chunk: Chunk) -> None:
        """Take its place back, if it has one."""

    def read(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Begin to read a chunk; ``done`` finds what went wrong in ``chunk.error``. If it raises, nothing was begun."""

    def write(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        """Begin to write one, likewise."""


class Waiting(Protocol):
    """How the thread that uses chunks stands still."""

    def wait(self, what: Link) -> None:
        """Until something may have changed; counted as time on that link."""

    def refuse(self, needed: int) -> NoReturn:
        """So many bytes would have to be held, and nothing that is under way will make room.

        Raises:
            BudgetError: always.
        """


class Core:
    """Chunks on the host over chunks on disk. One thread at a time calls this.

    Args:
        ledger: where held bytes are written.
        disk: the tier below; ``None`` when everything must stay on the host.
        budget: the most bytes the chunks may hold on the host, less what `reserve` sets aside.
        order: the expected order of uses.
        replacer: the eviction policy.
        prefetch: whether to read ahead of use.
        working: the most bytes that one use needs; what is borrowed ahead of another leaves them.

    Attributes:
        held: who holds bytes on the host.
        room: how much may be held.
        beside: guards that threads beside the one that trains have.
        failure: what went wrong behind everybody's back: a failed write. Its bytes are still here.
        holds_idle: whether chunks may stay after their use. If not, each tick evicts what is not in use.
        closed: nothing is read ahead any more.
    """

    def __init__(
        self,
        ledger: Ledger,
        disk: Disk | None,
        waiting: Waiting,
        budget: int,
        order: Order,
        replacer: Replacer,
        prefetch: bool = True,
        working: int = 0,
    ) -> None:
        self._disk = disk
        self._waiting = waiting
        self._order = order
        self._prefetch, self._working = prefetch, working
        self._ahead = Lookahead(order)
        self.held = Holdings(ledger, self._ahead.came, self._ahead.left)
        self.room = Room(budget, self.held, disk, replacer, self._begin_write)
        self._uses = 0
        self.beside = 0
        self.holds_idle = True
        self.failure: BaseException | None = None
        self.closed = False

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way that will make room."""
        return (self._disk is None or self._disk.count == 0) and self.beside == 0

    # -- what is set aside ------------------------------------------------------------------------

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set bytes aside; chunks above the new ceiling are evicted, as far as they are not pinned."""
        self.room.reserve(nbytes, ahead)
        self._make_room()

    def hold_idle(self, on: bool) -> None:
        """Whether chunks may stay after their use."""
        self.holds_idle = on
        if not on:
            self._trim()

    def _trim(self) -> None:
        """Evict all that is not in use, and wait until its bytes are given back.

        A write that is still under way holds its bytes: what is allocated meanwhile would come on top.
        """
        while self.held.cool():
            pass
        while True:
            for chunk in self.room.evictable():
                if chunk.residence is Residence.CLEAN:
                    self.held.give_back(chunk, Residence.DISK)
                else:
                    self._begin_write(chunk)
            leaving = any(chunk.pins == 0 and chunk.moving for chunk in self.held)
            if not leaving and not self.beside:
                return
            self._waiting.wait("disk write")

    def borrow(self, nbytes: int) -> None:
        """Make room for bytes that are not a chunk's, and count them until `repay`.

        Raises:
            BudgetError: they do not fit beside what is pinned.
        """
        self._make_room(nbytes=nbytes)
        self.held.borrow(nbytes)

    def borrow_ahead(self, nbytes: int, distance: int) -> bool:
        """The same for what is used in so many ticks, if what is needed sooner need not leave for it."""
        room = self.make_ahead(nbytes, distance)
        self.held.borrow(nbytes if room else 0)
        return room

    def make_ahead(self, nbytes: int, distance: int) -> bool:
        """Make room for what is used in so many ticks, or begin to; whether there is."""
        return self.has_spare(nbytes) and self.room.make(distance, nbytes=nbytes, ahead=True)

    def has_spare(self, nbytes: int) -> bool:
        """Whether so many bytes may be held beside any use."""
        return self._prefetch and self.holds_idle and self.room.floor >= self._working + nbytes

    def repay(self, nbytes: int) -> None:
        """Give borrowed bytes back."""
        self.held.borrow(-nbytes)
        self.pump()

    # -- uses -------------------------------------------------------------------------------------

    def acquire(self, chunks: Sequence[Chunk], access: Access) -> None:
        """Bring chunks to the host and pin them; waits until that is done (for writing, until no transfer uses them).

        Raises:
            BudgetError: they do not fit beside what is pinned already.
            TierError: a transfer failed; the chunks are as they were before the call.
        """
        self.report_failure()
        overwritten = list[Chunk]()
        for chunk in chunks:
            chunk.pins += 1
        try:
            for chunk in chunks:
                self._bring(chunk, access, overwritten)
            for chunk in chunks:
                self._settle(chunk, access)
        except BaseException:
            for chunk in overwritten:
                if chunk.pins == 1:  # by this call alone: what is on disk is still what it held
                    self.held.give_back(chunk, Residence.DISK)
            self.unpin(chunks)
            raise
        self._used(chunks)

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
        self.held.take(chunk, Residence.DIRTY)

    def _settle(self, chunk: Chunk, access: Access) -> None:
        """Wait until the chunk's bytes may be used as asked."""
        while not chunk.ready:
            if chunk.residence is Residence.READING:
                self._waiting.wait("disk read")
            elif chunk.error is not None and access is not Access.FRESH:
                raise chunk.error
            else:  # what could not be read is overwritten, and somebody may begin to read it meanwhile
                self._bring(chunk, access, [])
        if access is Access.READ:
            return
        while chunk.residence is Residence.WRITING:
            self._waiting.wait("disk write")
        if chunk.residence is Residence.CLEAN:
            chunk.move(Residence.DIRTY)

    def enter(self, chunks: Sequence[Chunk], beyond: int, claim: Callable[[], bool]) -> bool:
        """Pin chunks for a thread beside the one that trains, and begin to read those that are on disk, if there is
        room and the claim is granted; see `outcore.chunks.pool.Pool.guard_if_room`. Never waits."""
        if self.closed or (beyond >= 0 and not self.holds_idle):
            return False
        distance = min(beyond, *(self._order.next_use(chunk) for chunk in chunks))
        entered = False
        for chunk in chunks:
            chunk.pins += 1  # none of them may make room for the others
        try:
            absent = [chunk for chunk in chunks if not chunk.on_host]
            ready = (
                (beyond < 0 or all(chunk.error is None for chunk in absent))
                and self.room.make(distance, newcomers=absent)
                and claim()
            )
            if ready:
                self._begin_reads(absent)
                entered = True
        finally:
            if entered:
                self.beside += 1
            else:
                for chunk in chunks:
                    chunk.pins -= 1
                self.room.offer(chunks)
        return entered

    @staticmethod
    def arrived(reads: Sequence[Chunk], writes: Sequence[Chunk]) -> bool:
        """Whether chunks that were entered may be used."""
        return not any(c.residence is Residence.READING for c in reads) and not any(c.moving for c in writes)

    def touch(self, chunks: Sequence[Chunk], writes: Sequence[Chunk]) -> None:
        """Chunks that were entered, and have arrived, are used now; some of them are written."""
        for chunk in writes:
            if chunk.residence is Residence.CLEAN:
                chunk.move(Residence.DIRTY)
        self._used(chunks)

    def _used(self, chunks: Sequence[Chunk]) -> None:
        self._uses += 1
        for chunk in chunks:
            chunk.last_use = self._uses

    def unpin(self, chunks: Sequence[Chunk], beside: int = 0) -> None:
        """Chunks may leave again. ``beside`` guards of other threads end with it."""
        self.beside -= beside
        for chunk in chunks:
            assert chunk.pins > 0, chunk.name
            chunk.pins -= 1
        self.room.offer(chunks)
        if self.held.used > self.room.ceiling:  # room was set aside while they could not leave
            try:
                self.room.make()
            except TierError as error:
                self.failure = error  # the next guard raises it
        self.pump()

    def discard(self, chunks: Iterable[Chunk]) -> None:
        """Forget the bytes of chunks that are not pinned: afterwards they are empty, on host and disk."""
        for chunk in chunks:
            while chunk.moving:
                self._waiting.wait("disk write")
            assert chunk.pins == 0, chunk.name
            if chunk.on_host and self.holds_idle:
                self.held.empty(chunk)
            elif chunk.on_host:
                self.held.give_back(chunk, Residence.EMPTY)
            elif chunk.residence is Residence.DISK:
                self.held.forget(chunk)
            if self._disk is not None:
                self._disk.free(chunk)
        self.pump()

    # -- the future -------------------------------------------------------------------------------

    def advance(self, needs: Sequence[Chunk]) -> None:
        """The clock of the `Order` moved: read ahead as far as there is room."""
        self.room.needed = frozenset(needs)
        if self.holds_idle:
            self.pump()
        else:
            self._trim()

    def pump(self) -> None:
        """Read ahead and write behind, as far as there is room."""
        if not self._prefetch or not self.holds_idle or self.closed or self._disk is None:
            return
        try:
            self.room.read_ahead(self._ahead, self._begin_read, self._working)
        except TierError as error:
            self.failure = error  # this may be an I/O thread: the next guard raises it

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, newcomer: Chunk | None = None, nbytes: int = 0) -> None:
        """Wait until there is room for a chunk, or for bytes; or until no more is held than may be."""
        newcomers = () if newcomer is None else (newcomer,)
        while not self.room.make(nbytes=nbytes, newcomers=newcomers):
            if newcomer is not None and newcomer.on_host:
                return
            if self.quiet:
                if newcomer is None and not nbytes:
                    return
                self.report_failure()
                self._waiting.refuse(
                    self.held.used + nbytes + self.held.missing(newcomers) + self.room.reserved
                )
            self._waiting.wait("disk write")

    def report_failure(self) -> None:
        """Raise what went wrong behind the caller's back, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            for chunk in self.held:
                chunk.error = None
            self.room.offer(self.held)
            raise failure

    # -- transfers --------------------------------------------------------------------------------

    def _begin_read(self, chunk: Chunk) -> None:
        self._begin_reads((chunk,))

    def _begin_reads(self, chunks: Sequence[Chunk]) -> None:
        """Read chunks for which there is room. All have theirs before the first read, which may be over at once."""
        for chunk in chunks:
            chunk.error = None
            self.held.take(chunk, Residence.READING)
        begun = 0
        try:
            for chunk in chunks:
                assert self._disk is not None
                self._disk.read(chunk, self._read_done)
                begun += 1
        except BaseException:
            for chunk in chunks[begun:]:
                self.held.give_back(chunk, Residence.DISK)
            raise

    def _read_done(self, chunk: Chunk) -> None:
        if chunk.error is None:
            chunk.move(Residence.CLEAN)
            self.room.offer((chunk,))
        else:
            self.held.give_back(chunk, Residence.DISK)
        self.pump()

    def _begin_write(self, chunk: Chunk) -> None:
        assert self._disk is not None
        self._disk.allocate(chunk)
        chunk.move(Residence.WRITING)
        try:
            self._disk.write(chunk, self._write_done)
        except BaseException:
            chunk.move(Residence.DIRTY)
            raise

    def _write_done(self, chunk: Chunk) -> None:
        chunk.move(Residence.CLEAN if chunk.error is None else Residence.DIRTY)
        self.failure = self.failure or chunk.error
        crowded = self.held.used > self.room.ceiling or not self.holds_idle
        if chunk.residence is Residence.CLEAN and chunk.pins == 0 and crowded:
            self.held.give_back(chunk, Residence.DISK)
        self.room.offer((chunk,))
        self.pump()

    # -- the end ----------------------------------------------------------------------------------

    def empty(self) -> None:
        """Give every host byte back; no transfer is under way. The chunks' contents are lost."""
        for chunk in list(self.held):
            chunk.residence = Residence.DIRTY  # whatever it was
            self.held.give_back(chunk, Residence.EMPTY)
        while self.held.cool():
            pass
