"""The pool of `outcore.chunks.pool` on a virtual clock.

What decides is the run's own: what is believed to come (`outcore.trace.schedule`), what leaves and what is written
behind (`outcore.chunks.room`), in which order (`outcore.chunks.replacers`), what is read ahead
(`outcore.chunks.lookahead`), and who holds how much (`outcore.chunks.holdings`). So a plan knows no more of the future
than a run: nothing in the first laps of a kind, and then what was on record. Here are the transfers, which take time
but move no bytes, and the waiting for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from outcore.chunks.chunk import Chunk, Residence
from outcore.chunks.holdings import Holdings
from outcore.chunks.lookahead import Lookahead
from outcore.chunks.replacers import Belady
from outcore.chunks.room import Room
from outcore.errors import BudgetError
from outcore.memory.ledger import Ledger
from outcore.planning.beside import FOREVER, Beside, Nobody
from outcore.planning.flow import Disk, Piece, Traffic
from outcore.trace.schedule import Schedule

LEAST = 0.1
"""The share of its speed that computing keeps in any case, whatever the disk's threads take."""


def refused(tier: str, needed: int, budget: int) -> BudgetError:
    """What must be on a tier at one moment of a simulated run is more than its budget."""
    return BudgetError(tier, needed, budget, "give it more, or use smaller micro-batches or recomputation")


class Cache:
    """Pieces on the host over pieces on disk.

    Attributes:
        now: seconds since the run began, as the training thread sees it.
        waited: seconds it stood still, by what for.
        peak: the most bytes the host held.
        disk_peak: the most bytes the disk held.
        holding: whether pieces may stay after their use.
        beside: who works beside the training thread.
        leaving: bytes being written to disk.
        use: seconds of a thread that each use of a piece takes.
        schedule: what the run believes of the ticks to come.

    Args:
        budget: bytes of the host.
        disk_budget: bytes of the disk; 0 for none.
        traffic: between them.
        working: the most bytes that one use needs.
    """

    def __init__(
        self,
        budget: int,
        disk_budget: int,
        traffic: Traffic,
        working: int = 0,
    ) -> None:
        self._budget = budget
        self._disk_budget = disk_budget
        self.schedule = Schedule()
        self._coming = Lookahead(self.schedule)
        self._held = Holdings(Ledger(), self._coming.came, self._coming.left)
        self._room = Room(
            budget, self._held, self, Belady(self.schedule), self._begin_write, has_disk=bool(disk_budget)
        )
        self._working = working
        self.disk = Disk(traffic, self._moved) if disk_budget else None
        self.now = 0.0
        self.reserved = 0
        self.disk_used = 0
        self.peak = 0
        self.disk_peak = 0
        self.holding = True
        self.beside: Beside = Nobody()
        self.waited = {"disk read": 0.0, "disk write": 0.0, "update": 0.0}
        self.leaving = 0
        self._slowed = traffic.slowed
        self.use = traffic.use
        self._moment: float | None = None  # of the transfer that just ended, while the clock is still behind
        self._count = 0

    @property
    def used(self) -> int:
        """Bytes that are held now."""
        return self._held.used

    @property
    def ceiling(self) -> int:
        """Bytes the pieces may hold now."""
        return self._room.ceiling

    # -- what holds bytes -------------------------------------------------------------------------

    def _note(self) -> None:
        self.peak = max(self.peak, self._held.used + self.reserved)

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set aside for activations; what no longer fits leaves, as far as it is not pinned."""
        self.reserved = min(self.reserved, nbytes)  # it is not there yet while room is made for it
        self._room.reserve(nbytes, ahead)
        while not self._room.make() and not self.quiet:
            self.wait("disk write")
        if self._held.used > self._room.ceiling:
            raise refused("host", self._held.used + nbytes, self._budget)
        self.reserved = nbytes
        self._note()

    def borrow(self, nbytes: int) -> None:
        """Bytes that are not a piece's."""
        self._make_room(nbytes=nbytes)
        self._held.borrow(nbytes)
        self._note()

    def repay(self, nbytes: int) -> None:
        """Give them back."""
        self._held.borrow(-nbytes)
        self._pump()

    # -- time -------------------------------------------------------------------------------------

    def work(self, seconds: float, shared: bool = False) -> None:
        """The training thread is busy with what takes so long by itself.

        Args:
            shared: with what others need, too.
        """
        left = seconds
        while left > 0:
            speed = self.beside.leaves if shared else 1.0
            if shared and self.disk is not None and not self.disk.idle:
                speed *= max(LEAST, 1.0 - self._slowed * self.disk.costs)
            end = min(self.now + left / speed, self._next(shared))
            left -= (end - self.now) * speed
            self._pass(end, shared)
            if left < 1e-12:
                return

    def wait_until(self, moment: float) -> None:
        """Stand still until then."""
        while self.now < moment:
            self._pass(min(moment, self._next(False)), False)

    def _next(self, shared: bool) -> float:
        """When something happens by itself."""
        disk = FOREVER
        if self.disk is not None and not self.disk.idle:
            disk = self.disk.next_end(self._slowed if shared else 1.0)
        return max(self.now, min(disk, self.beside.next_end(self.now, shared)))

    def _pass(self, until: float, shared: bool) -> None:
        """Time passes; nothing else happens before its end."""
        self.beside.work(until - self.now, shared)
        self.now = until
        if self.disk is not None:
            self.disk.run(until, self._slowed if shared else 1.0)
        self.beside.look()

    def wait(self, what: str) -> None:
        """Stand still until the next transfer or the next update ends."""
        end = self._next(False)
        if end >= FOREVER:
            raise refused("host", self.used + self.reserved, self._budget)
        self.waited[what] += end - self.now
        self._pass(end, False)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way that will make room."""
        return (self.disk is None or self.disk.idle) and not self.beside.busy

    def lap(self, key: Hashable) -> None:
        """A lap begins."""
        self.schedule.begin(key)
        self._advance(())

    def tick(self, key: Hashable, needs: Sequence[Piece]) -> None:
        """A use begins."""
        self.schedule.advance(key, needs)
        self._advance(needs)

    def _advance(self, needs: Sequence[Piece]) -> None:
        self._room.needed = frozenset(needs)
        if self.holding:
            self._pump()
        else:
            self.trim()

    # -- guards -----------------------------------------------------------------------------------

    def enter(self, pieces: Sequence[Piece]) -> bool:
        """Pin pieces for somebody beside the training thread and begin to read those that are not there, if there is
        room that nothing needed sooner takes."""
        if not self.holding:
            return False
        beyond = min(self.schedule.next_use(piece) for piece in pieces)
        for piece in pieces:
            piece.pins += 1
        absent = [piece for piece in pieces if not piece.on_host]
        if self._room.make(beyond, newcomers=absent):
            for piece in absent:
                self._begin(piece)
            return True
        for piece in pieces:
            piece.pins -= 1
        self._room.offer(pieces)
        return False

    def touch(self, pieces: Sequence[Piece]) -> None:
        """Pieces that are there and pinned are about to be written."""
        self._count += 1
        for piece in pieces:
            if piece.residence is Residence.CLEAN:
                piece.move(Residence.DIRTY)
            piece.last_use = self._count

    def bring(self, pieces: Sequence[Piece], write: bool = False, fresh: bool = False) -> None:
        """Pin pieces, once they are there (for writing, once no transfer uses them)."""
        self.work(self.use * len(pieces), shared=True)
        for piece in pieces:
            piece.pins += 1
        for piece in pieces:
            if not piece.on_host:
                self._make_room(piece)
            if not piece.on_host:
                self._begin(piece, fresh)
        self._count += 1
        for piece in pieces:
            while piece.residence is Residence.READING:
                self.wait("disk read")
            if write or fresh:
                while piece.residence is Residence.WRITING:
                    self.wait("disk write")
                if piece.residence is Residence.CLEAN:
                    piece.move(Residence.DIRTY)
            piece.last_use = self._count

    def release(self, pieces: Sequence[Piece]) -> None:
        """Unpin them: they may leave."""
        for piece in pieces:
            piece.pins -= 1
        self._room.offer(pieces)
        if self._held.used > self._room.ceiling:
            self._room.make()
        self._pump()

    def clear_ahead(self, nbytes: int, beyond: int) -> None:
        """Begin to make room for what comes soon, of what is used later."""
        if self.holding:
            self._room.make(beyond, nbytes=nbytes, ahead=True)

    def discard(self, piece: Piece) -> None:
        """Forget its bytes, on host and disk."""
        while piece.moving:
            self.wait("disk write")
        if piece.on_host and self.holding:
            self._held.empty(piece)
        elif piece.on_host:
            self._held.give_back(piece, Residence.EMPTY)
        elif piece.residence is Residence.DISK:
            self._held.forget(piece)
        if piece.stored:
            piece.stored = False
            self.disk_used -= piece.nbytes
        self._pump()

    def trim(self) -> None:
        """Evict all that is not in use, and wait for it."""
        while self._held.cool():
            pass
        while True:
            for piece in self._room.evictable():
                if piece.residence is Residence.CLEAN:
                    self._held.give_back(piece, Residence.DISK)
                else:
                    self._begin_write(piece)
            if not any(piece.pins == 0 and piece.moving for piece in self._held):
                return
            self.wait("disk write")

    def _make_room(self, newcomer: Piece | None = None, nbytes: int = 0) -> None:
        newcomers = () if newcomer is None else (newcomer,)
        while not self._room.make(nbytes=nbytes, newcomers=newcomers):
            if newcomer is not None and newcomer.on_host:
                return
            if self.quiet:
                more = nbytes + self._held.missing(newcomers)
                raise refused("host", self._held.used + more + self._room.reserved, self._budget)
            self.wait("disk write")

    # -- transfers --------------------------------------------------------------------------------

    def _begin(self, piece: Piece, fresh: bool = False) -> None:
        """Let a piece come for which there is room."""
        if piece.residence is Residence.DISK and not fresh:
            self._begin_read(piece)
        else:
            self._held.take(piece, Residence.DIRTY)
            self._note()

    def _begin_read(self, chunk: Chunk) -> None:
        self._held.take(chunk, Residence.READING)
        self._note()
        self._submit(chunk, False)

    def _begin_write(self, chunk: Chunk) -> None:
        assert isinstance(chunk, Piece)
        if not chunk.stored:
            chunk.stored = True
            self.disk_used += chunk.nbytes
            self.disk_peak = max(self.disk_peak, self.disk_used)
            if self.disk_used > self._disk_budget:
                raise refused("disk", self.disk_used, self._disk_budget)
        chunk.move(Residence.WRITING)
        self.leaving += chunk.nbytes
        self._submit(chunk, True)

    def _submit(self, chunk: Chunk, writing: bool) -> None:
        assert isinstance(chunk, Piece)
        assert self.disk is not None
        self.disk.submit(chunk, writing, self.now if self._moment is None else self._moment)

    def _pump(self) -> None:
        if self.disk is not None and self.holding:
            self._room.read_ahead(self._coming, self._begin_read, self._working)

    def _moved(self, piece: Piece, writing: bool, end: float) -> None:
        """A transfer is over."""
        piece.move(Residence.CLEAN)
        self._moment = end
        if writing:
            self.leaving -= piece.nbytes
            if piece.pins == 0 and (self._held.used > self._room.ceiling or not self.holding):
                self._held.give_back(piece, Residence.DISK)
        self._room.offer((piece,))
        self._pump()
        self._moment = None
