"""The device stage of `outcore.model.device_stage` on a virtual clock: frames, lifts, and gradients going down.

[Note: Handling]
Each piece that is copied keeps the training thread for a moment: it sees to it that the piece is there, asks for the
copy, and lets it go. As long as the device has work this is hidden behind it. It is not where a copy can't begin before
it was asked for, and where the thread waited for a copy with nothing left for the device to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outcore.chunks.guards import Access
from outcore.chunks.replacers import NEVER
from outcore.model.device_stage import AHEAD, AHEAD_TICKS
from outcore.planning.cache import Cache
from outcore.planning.flow import Link, Piece, refused
from outcore.planning.updates import Job, Progress


@dataclass(eq=False)
class Frame:
    """A unit's parameters on the device.

    Attributes:
        nbytes: without padding to pages.
        gradient: bytes of the gradient buffers of its runs.
        updates: of its parameters, of the last step.
    """

    nbytes: int
    gradient: int
    pieces: Sequence[Piece]
    here: bool = False
    opened: bool = False
    updates: Sequence[Job] = ()
    filled: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether a lift would wait for nothing."""
        updated = all(job.progress is Progress.DONE for job in self.updates)
        return updated and all(piece.ready for piece in self.pieces)


@dataclass
class _Landing:
    """One piece's copy down; ``held`` are the bytes of the buffer, with its last piece."""

    arrival: float
    piece: Piece
    first: bool
    held: int
    number: int
    landed: Callable[[int], None]


@dataclass
class Frames:
    """Frames within the device budget.

    Attributes:
        handling: seconds of the training thread for each piece that is copied; see [Note: Handling].
        peak: the most bytes the device held.
        waited: seconds that computing stood still for the link to the device, and for the one from it.
    """

    frames: Sequence[Frame]
    cache: Cache
    budget: int
    link_in: Link
    link_out: Link
    handling: float = 0.0
    occupied: int = 0
    reserved: int = 0
    ahead: int = 0
    held: int = 0
    peak: int = 0
    waited: dict[str, float] = field(default_factory=lambda: {"device in": 0.0, "device out": 0.0})
    _holding: bool = True
    _here: int = 0
    _lifting: list[tuple[float, Piece]] = field(default_factory=list)
    _landing: list[_Landing] = field(default_factory=list)

    # -- budget -----------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return self._here + self.held + self.occupied

    def hold_idle(self, on: bool) -> None:
        """Whether frames may stay after their use."""
        self._holding = on

    def _touch(self) -> None:
        self.peak = max(self.peak, self.used + self.reserved)

    def reserve(self, nbytes: int, ahead: int) -> None:
        self.reserved, self.ahead = nbytes, max(nbytes, ahead)
        if not self._try_room(0, -1):
            self.drain()
            if not self._try_room(0, -1):
                raise refused("device", self.used + nbytes, self.budget)
        self._touch()

    def _try_room(self, nbytes: int, beyond: int) -> bool:
        while self.used + self.reserved + nbytes > self.budget:
            victim, furthest = None, beyond
            for frame in self.frames:
                if frame.here and not frame.opened:
                    use = self._next_use(frame)
                    if use > furthest:
                        victim, furthest = frame, use
            if victim is None:
                return False
            self.free(victim)
        return True

    def _next_use(self, frame: Frame) -> int:
        return self.cache.schedule.next_use(frame.pieces[0]) if frame.pieces else NEVER

    def _make_room(self, nbytes: int) -> None:
        if self._try_room(nbytes, -1):
            return
        self.drain()
        if not self._try_room(nbytes, -1):
            raise refused("device", self.used + self.reserved + nbytes, self.budget)

    def free(self, frame: Frame) -> None:
        if frame.here:
            frame.here = False
            self._here -= frame.nbytes

    # -- parameters -------------------------------------------------------------------------------

    def open(self, unit: int) -> None:
        frame = self.frames[unit]
        if not frame.here:
            self._make_room(frame.nbytes)
            self._lift(frame)
        frame.opened = True
        if frame.filled > self.cache.now:
            self.waited["device in"] += frame.filled - self.cache.now
            self.cache.wait_until(frame.filled)
        self.look_ahead()

    def close(self, unit: int) -> None:
        frame = self.frames[unit]
        frame.opened = False
        if self._holding:
            self.look_ahead()
        else:
            self.free(frame)

    def _lift(self, frame: Frame) -> None:
        frame.here = True
        self._here += frame.nbytes
        self._touch()
        asked = self.cache.now
        for piece in frame.pieces:
            self._settle(piece.nbytes)
            self.cache.bring((piece,))
            asked = max(asked, self.cache.now) + self.handling
            self._lifting.append((self.link_in.send(piece.nbytes, asked), piece))
        frame.filled = self._lifting[-1][0] if self._lifting else self.cache.now

    def _settle(self, nbytes: int) -> None:
        while self._lifting and self._lifting[0][0] <= self.cache.now:
            self.cache.release((self._lifting.pop(0)[1],))
        bound = max(self.cache.ceiling // 4, nbytes)
        while self._lifting and sum(piece.nbytes for _, piece in self._lifting) + nbytes > bound:
            self._end_lift()

    def _end_lift(self) -> None:
        end, piece = self._lifting.pop(0)
        if end > self.cache.now:
            self.waited["device in"] += end - self.cache.now
            self.cache.wait_until(end)
        self.cache.release((piece,))

    def look_ahead(self) -> None:
        self._settle(0)
        self.poll()
        if not self._holding:
            return
        beside = self.ahead - self.reserved
        uses = 0
        for distance, key in enumerate(self.cache.schedule.upcoming_keys(AHEAD_TICKS), start=1):
            assert isinstance(key, tuple)
            if key[0] not in ("forward", "backward"):
                continue
            phase, unit = key
            frame = self.frames[unit]
            uses += 1
            if uses == 1 and phase == "backward":
                beside += max([frame.gradient, *(f.gradient for f in self.frames if f.opened)])
            if frame.here:
                if uses == AHEAD:
                    return
                continue
            if not frame.ready:
                return
            if not self._try_room(frame.nbytes + beside, distance):
                return
            self._lift(frame)
            if uses == AHEAD:
                return

    # -- gradients --------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> None:
        """A run's gradients gather on the device."""
        self.poll()
        self._make_room(nbytes)
        self.held += nbytes
        self._touch()

    def send(self, nbytes: int, pieces: Sequence[Piece], first: bool, landed: Callable[[int], None]) -> None:
        """A run's gradients go down, into their pieces or, if those hold some already, beside them.

        Args:
            nbytes: of the buffer, which goes when the last piece has landed.
            first: whether the pieces hold nothing yet.
            landed: called with the number of each piece that has.
        """
        asked = self.cache.now
        for k, piece in enumerate(pieces):
            self._bound(piece.nbytes)
            if first:
                self.cache.bring((piece,), Access.FRESH)
            else:
                self.cache.borrow(piece.nbytes)
            asked = max(asked, self.cache.now) + self.handling
            arrival = self.link_out.send(piece.nbytes, asked)
            held = nbytes if k + 1 == len(pieces) else 0
            self._landing.append(_Landing(arrival, piece, first, held, k, landed))
        self.poll()

    def _bound(self, nbytes: int) -> None:
        bound = self.cache.ceiling // 4
        while self._landing and sum(x.piece.nbytes for x in self._landing) + nbytes > bound:
            self._land_first()

    def poll(self) -> None:
        while self._landing and self._landing[0].arrival <= self.cache.now:
            self._land(self._landing.pop(0))

    def _land_first(self) -> None:
        landing = self._landing.pop(0)
        if landing.arrival > self.cache.now:
            self.waited["device out"] += landing.arrival - self.cache.now
            self.cache.wait_until(landing.arrival)
            self.cache.work(self.handling)
        self._land(landing)

    def _land(self, landing: _Landing) -> None:
        if landing.first:
            self.cache.release((landing.piece,))
        landing.landed(landing.number)
        if not landing.first:
            self.cache.repay(landing.piece.nbytes)
        self.held -= landing.held

    def drain(self) -> None:
        while self._landing:
            self._land_first()

    def synchronize(self) -> None:
        """All copies are over."""
        self.drain()
        while self._lifting:
            self._end_lift()
