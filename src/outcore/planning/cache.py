"""The pool of `outcore.chunks.pool` on a virtual clock.

The same states, the same rule of room and the same victims (`outcore.planning.victims`), without threads and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.chunks.chunk import Residence
from outcore.errors import BudgetError
from outcore.planning.beside import FOREVER, Beside, Nobody
from outcore.planning.flow import Disk, Piece
from outcore.planning.route import Foresight, Route
from outcore.planning.victims import Victims


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

    Args:
        budget: bytes of the host.
        disk_budget: bytes of the disk; 0 for none.
        read: bytes per second of the disk.
        write: likewise.
        taxed: share of its speed that the training thread keeps while the disk works.
        slowed: share of its speed that the disk keeps while the training thread computes.
        turn: seconds that a transfer takes beside those of its bytes.
    """

    def __init__(
        self,
        budget: int,
        disk_budget: int,
        read: float,
        write: float,
        route: Route,
        taxed: float = 1.0,
        slowed: float = 1.0,
        turn: float = 0.0,
    ) -> None:
        self._budget = budget
        self._disk_budget = disk_budget
        self._route = route
        self._foresight = Foresight(route)
        self._victims = Victims(route, bool(disk_budget))
        self.disk = Disk(read, write, self._moved, turn) if disk_budget else None
        self.now = 0.0
        self.position = -1
        self.used = 0
        self.reserved = 0
        self.ahead = 0
        self.disk_used = 0
        self.peak = 0
        self.disk_peak = 0
        self.holding = True
        self.beside: Beside = Nobody()
        self.waited = {"disk read": 0.0, "disk write": 0.0, "update": 0.0}
        self._taxed = taxed
        self._slowed = slowed
        self._leaving = 0
        self._count = 0
        self._resident: dict[Piece, None] = {}  # in order: a set would be in that of addresses
        self._warm: dict[Piece, None] = {}
        self._needed: frozenset[Piece] = frozenset()

    @property
    def ceiling(self) -> int:
        """Bytes the pieces may hold now."""
        return self._budget - self.reserved

    def is_there(self, piece: Piece) -> bool:
        """Whether a guard for reading would not wait."""
        return piece.on_host and piece.residence is not Residence.READING

    # -- what holds bytes -------------------------------------------------------------------------

    def _charge(self, nbytes: int) -> None:
        self.used += nbytes
        self.peak = max(self.peak, self.used + self.reserved)

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set aside for activations; what no longer fits leaves, as far as it is not pinned."""
        if nbytes <= self.reserved:
            self.reserved, self.ahead = nbytes, max(nbytes, ahead)
            return
        ceiling = self._budget - nbytes
        while self.used > ceiling:
            if self._try_room(0, -1, ceiling) or self.quiet:
                break
            self.wait("disk write")
        if self.used > ceiling:
            raise refused("host", self.used + nbytes, self._budget)
        self.reserved, self.ahead = nbytes, max(nbytes, ahead)
        self.peak = max(self.peak, self.used + self.reserved)

    def borrow(self, nbytes: int) -> None:
        """Bytes that are not a piece's."""
        self._make_room(nbytes)
        self._charge(nbytes)

    def repay(self, nbytes: int) -> None:
        self.used -= nbytes

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
                speed *= self._taxed
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

    def believe(self, route: Route, position: int) -> None:
        """From this position on another order is expected."""
        if route is self._route:
            return
        self._route, self._foresight = route, Foresight(route, position)
        self._victims = Victims(route, self.disk is not None)
        for piece in self._resident:
            if piece.pins == 0:
                piece.next = route.next_use(piece, self.position)
                self._victims.offer(piece)

    def advance(self, position: int) -> None:
        """The run is at this tick."""
        self.position = position
        self._route.pass_by(position)
        self._needed = frozenset(self._route.ticks[position % len(self._route)][1])
        self._foresight.follow(position)
        if self.holding:
            self._pump(self.now)
        else:
            self.trim()

    # -- guards -----------------------------------------------------------------------------------

    def enter(self, pieces: Sequence[Piece]) -> bool:
        """Pin pieces for somebody beside the training thread and begin to read those that are not there, if there is
        room that nothing needed sooner takes."""
        if not self.holding:
            return False
        beyond = min(self._route.next_use(piece, self.position) for piece in pieces)
        for piece in pieces:
            piece.pins += 1
        absent = [piece for piece in pieces if not piece.on_host]
        if self._try_room(sum(piece.nbytes for piece in absent), beyond, self.ceiling):
            for piece in absent:
                self._begin_read(piece, self.now)
            return True
        for piece in pieces:
            piece.pins -= 1
            if piece.pins == 0:
                self._victims.offer(piece)  # the search may have met it while it was pinned
        return False

    def touch(self, pieces: Sequence[Piece]) -> None:
        """Pieces that are there and pinned are about to be written."""
        self._count += 1
        for piece in pieces:
            piece.residence = Residence.DIRTY
            piece.last = self._count

    def fulfil(self, position: int) -> None:
        """The tick at this position has nothing left to do when it comes."""
        self._route.fulfil(position)
        self._foresight.fulfil(position)

    def bring(self, pieces: Sequence[Piece], write: bool = False, fresh: bool = False) -> None:
        """Pin pieces, once they are there (for writing, once no transfer uses them)."""
        for piece in pieces:
            piece.pins += 1
        for piece in pieces:
            if piece in self._warm:
                del self._warm[piece]
                piece.residence = Residence.DIRTY
                self._resident[piece] = None
            elif piece.residence is Residence.EMPTY or (fresh and piece.residence is Residence.DISK):
                self._make_room(piece.nbytes)
                piece.residence = Residence.DIRTY
                self._resident[piece] = None
                self._charge(piece.nbytes)
            elif piece.residence is Residence.DISK:
                self._make_room(piece.nbytes)
                if piece.residence is Residence.DISK:
                    self._begin_read(piece, self.now)
        self._count += 1
        for piece in pieces:
            while piece.residence is Residence.READING:
                self.wait("disk read")
            if write or fresh:
                while piece.residence is Residence.WRITING:
                    self.wait("disk write")
                piece.residence = Residence.DIRTY
            piece.last = self._count

    def release(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.pins -= 1
            if piece.pins == 0:
                piece.next = self._route.next_use(piece, self.position)
                self._victims.offer(piece)
        if self.used + self.reserved > self._budget:
            self._try_room(0, -1, self._budget - self.reserved)
        self._pump(self.now)

    def clear_ahead(self, nbytes: int, beyond: int) -> None:
        """Begin to make room for what comes soon, of what is used later."""
        if self.holding:
            self._try_room(nbytes, self.position + beyond, self._budget - self.ahead)

    def discard(self, piece: Piece) -> None:
        """Forget its bytes, on host and disk."""
        while piece.residence in (Residence.READING, Residence.WRITING):
            self.wait("disk write")
        if piece.on_host:
            self._resident.pop(piece, None)
            self._warm[piece] = None  # a note in outcore.chunks.holdings says why
            if not self.holding:
                self._cool()
        piece.residence = Residence.EMPTY
        if piece.stored:
            piece.stored = False
            self.disk_used -= piece.nbytes
        self._pump(self.now)

    def trim(self) -> None:
        """Evict all that is not in use, and wait for it."""
        while self._cool():
            pass
        for piece in list(self._resident):
            if piece.pins == 0:
                self._evict(piece, self.now)
        while any(
            p.pins == 0 and p.residence in (Residence.WRITING, Residence.READING) for p in self._resident
        ):
            self.wait("disk write")

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        while not self._try_room(nbytes, -1, self._budget - self.reserved):
            if self.quiet:
                raise refused("host", self.used + nbytes + self.reserved, self._budget)
            self.wait("disk write")

    def _try_room(self, nbytes: int, beyond: int, ceiling: int) -> bool:
        while self.used + nbytes > ceiling:
            if self._cool():
                continue
            if self._leaving >= self.used + nbytes - ceiling:
                return False
            victim = self._victims.take(beyond, self.position, self._needed)
            if victim is None:
                return False
            self._evict(victim, self.now)
        return True

    def _cool(self) -> bool:
        """Give back the pages that hold nothing for the longest."""
        piece = next(iter(self._warm), None)
        if piece is None:
            return False
        del self._warm[piece]
        self.used -= piece.nbytes
        return True

    def _evict(self, piece: Piece, now: float) -> None:
        if piece.residence is Residence.CLEAN:
            self._leave(piece)
        elif piece.residence is Residence.DIRTY and self.disk is not None:
            if not piece.stored:
                piece.stored = True
                self.disk_used += piece.nbytes
                self.disk_peak = max(self.disk_peak, self.disk_used)
                if self.disk_used > self._disk_budget:
                    raise refused("disk", self.disk_used, self._disk_budget)
            piece.residence = Residence.WRITING
            self._leaving += piece.nbytes
            self.disk.submit(piece, True, now)

    def _leave(self, piece: Piece) -> None:
        """Its bytes are on disk, and here no more."""
        piece.residence = Residence.DISK
        self._resident.pop(piece, None)
        self.used -= piece.nbytes
        self._foresight.lose(piece)

    # -- transfers --------------------------------------------------------------------------------

    def _begin_read(self, piece: Piece, now: float) -> None:
        assert self.disk is not None
        piece.residence = Residence.READING
        self._resident[piece] = None
        self._charge(piece.nbytes)
        self.disk.submit(piece, False, now)

    def _pump(self, now: float) -> None:
        if self.disk is None or not self.holding:
            return
        ceiling = self._budget - self.ahead
        while (found := self._foresight.peek(ceiling // 4, self.position)) is not None:
            tick, piece = found
            if piece.residence is Residence.DISK:
                if not self._try_room(piece.nbytes, tick, ceiling):
                    return
                piece.next = tick
                self._begin_read(piece, now)
            self._foresight.take(piece)

    def _moved(self, piece: Piece, writing: bool, end: float) -> None:
        piece.residence = Residence.CLEAN
        if writing:
            self._leaving -= piece.nbytes
            if piece.pins == 0 and (self.used + self.reserved > self._budget or not self.holding):
                self._leave(piece)
            elif piece.pins == 0:
                self._victims.offer(piece)
        elif piece.pins == 0:
            self._victims.offer(piece)
        self._pump(end)
