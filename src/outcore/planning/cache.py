"""The pool of `outcore.chunks.pool` on a virtual clock.

What is done when is the run's own (`outcore.chunks.core`), and so is what is believed to come
(`outcore.trace.schedule`). So a plan knows no more of the future than a run: nothing in the first laps of a kind, and
then what was on record. Here is the time that transfers take, though no byte moves, and the waiting for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NoReturn

from outcore.chunks.core import Core
from outcore.chunks.guards import Access
from outcore.chunks.replacers import NEVER, Belady
from outcore.memory.ledger import Ledger
from outcore.planning.beside import FOREVER, Beside, Nobody
from outcore.planning.flow import Disk, Piece, Traffic, refused
from outcore.trace.schedule import Schedule

LEAST = 0.1
"""The share of its speed that computing keeps in any case, whatever the disk's threads take."""

ASIDE = "activations"
"""The kind of the bytes that are set aside."""


class Cache:
    """Pieces on the host over pieces on disk.

    Attributes:
        now: seconds since the run began, as the training thread sees it.
        waited: seconds it stood still, by what for.
        reserved: bytes set aside.
        ledger: what host and disk hold, what is set aside included.
        beside: who works beside the training thread.
        use: seconds of a thread that each use of a piece takes.
        schedule: what the run believes of the ticks to come.
        disk: the tier below, if there is one.

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
        self.now = 0.0
        self.ledger = Ledger()
        self.schedule = Schedule()
        self.disk = Disk(traffic, disk_budget, self.ledger, lambda: self.now) if disk_budget else None
        replacer = Belady(self.schedule)
        self._core = Core(self.ledger, self.disk, self, budget, self.schedule, replacer, working=working)
        self.reserved = 0
        self.beside: Beside = Nobody()
        self.waited = {"disk read": 0.0, "disk write": 0.0, "update": 0.0}
        self._slowed = traffic.slowed
        self.use = traffic.use

    @property
    def used(self) -> int:
        """Bytes that pieces hold now, and what is borrowed."""
        return self._core.held.used

    @property
    def ceiling(self) -> int:
        """Bytes the pieces may hold now."""
        return self._core.room.ceiling

    # -- what holds bytes -------------------------------------------------------------------------

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set aside for activations; what no longer fits leaves, as far as it is not pinned."""
        self._set_aside(min(self.reserved, nbytes))  # it is not there yet while room is made for it
        self._core.reserve(nbytes, ahead)
        if self.used > self.ceiling:
            raise refused("host", self.used + nbytes, self._budget)
        self._set_aside(nbytes)

    def _set_aside(self, nbytes: int) -> None:
        self.ledger.hold("host", nbytes - self.reserved, ASIDE)
        self.reserved = nbytes

    def hold_idle(self, on: bool) -> None:
        """Whether pieces may stay after their use."""
        self._core.hold_idle(on)

    def borrow(self, nbytes: int) -> None:
        """Bytes that are not a piece's."""
        self._core.borrow(nbytes)

    def repay(self, nbytes: int) -> None:
        """Give them back."""
        self._core.repay(nbytes)

    def make_ahead(self, nbytes: int, distance: int) -> None:
        """Begin to make room for what comes in so many ticks, of what is used later."""
        self._core.make_ahead(nbytes, distance)

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

    def refuse(self, needed: int) -> NoReturn:
        raise refused("host", needed, self._budget)

    def lap(self, key: Hashable) -> None:
        """A lap begins."""
        self.schedule.begin(key)
        self._core.advance(())

    def tick(self, key: Hashable, needs: Sequence[Piece]) -> None:
        """A use begins."""
        self.schedule.advance(key, needs)
        self._core.advance(needs)

    # -- uses -------------------------------------------------------------------------------------

    def bring(self, pieces: Sequence[Piece], access: Access = Access.READ) -> None:
        """Pin pieces, once they are there (for writing, once no transfer uses them)."""
        self.work(self.use * len(pieces), shared=True)
        self._core.acquire(pieces, access)

    def release(self, pieces: Sequence[Piece]) -> None:
        """Unpin them: they may leave."""
        self._core.unpin(pieces)

    def enter(self, pieces: Sequence[Piece]) -> bool:
        """Pin pieces for somebody beside the training thread and begin to read those that are not there, if there is
        room that nothing needed sooner takes."""
        return self._core.enter(pieces, NEVER, lambda: True)

    def touch(self, reads: Sequence[Piece], writes: Sequence[Piece]) -> bool:
        """Use pieces that were entered, if all have arrived."""
        if not self._core.arrived(reads, writes):
            return False
        self._core.touch((*reads, *writes), writes)
        return True

    def leave(self, pieces: Sequence[Piece]) -> None:
        """Unpin what was entered."""
        self._core.unpin(pieces, beside=1)

    def discard(self, pieces: Sequence[Piece]) -> None:
        """Forget their bytes, on host and disk."""
        self._core.discard(pieces)
