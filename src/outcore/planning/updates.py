"""The updates of `outcore.optim.pipeline` on a virtual clock: by a thread of their own, or where their unit is used."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from outcore.chunks.guards import Access
from outcore.planning.beside import FOREVER
from outcore.planning.cache import Cache
from outcore.planning.flow import Piece


class Progress(Enum):
    """How far an update is."""

    WAITING = "waiting"
    ENTERED = "entered"
    """Its pieces are pinned for the thread, and on their way."""
    DONE = "done"


@dataclass(eq=False)
class Job:
    """The update of one chunk in one step.

    Attributes:
        key: of its tick, just before the use of its unit.
        seconds: that it takes by itself.
        ticked: its unit was asked for.
    """

    gradient: Piece
    written: Sequence[Piece]
    key: Hashable
    seconds: float
    progress: Progress = Progress.WAITING
    ticked: bool = False

    @property
    def pieces(self) -> Sequence[Piece]:
        """All that it needs."""
        return (self.gradient, *self.written)


class Updater:
    """The thread, and what the training thread does of its work. Is `outcore.planning.beside.Beside`.

    Args:
        both: what computing and an update reach together when both run, compared with one alone.

    Attributes:
        seconds: of updates done so far.
    """

    def __init__(self, cache: Cache, both: float) -> None:
        self._cache = cache
        self._both = both
        self._two = False
        self._jobs: list[Job] = []
        self._first = 0
        self._current: Job | None = None
        self._left: float | None = None
        self._looking = False
        self.seconds = 0.0

    # -- the thread -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an update is under way."""
        return self._current is not None

    @property
    def _share(self) -> float:
        """What each of two gets: half, if they are two updates."""
        return 0.5 if self._two else self._both / 2

    @property
    def leaves(self) -> float:
        return self._share if self._left is not None else 1.0

    def next_end(self, now: float, shared: bool) -> float:
        if self._left is None:
            return FOREVER
        return now + max(0.0, self._left) / (self._share if shared else 1.0)

    def work(self, seconds: float, shared: bool) -> None:
        if self._left is not None:
            self._left -= seconds * (self._share if shared else 1.0)

    def look(self) -> None:
        if self._looking:  # what it does is told to it, too
            return
        self._looking = True
        try:
            while self._go_on():
                pass
        finally:
            self._looking = False

    def _go_on(self) -> bool:
        """Take one step, if one can be taken."""
        job = self._current
        if job is None:
            while self._first < len(self._jobs) and self._jobs[self._first].progress is not Progress.WAITING:
                self._first += 1
            if self._first == len(self._jobs):
                return False
            job = self._jobs[self._first]
            if not self._cache.enter(job.pieces):
                return False
            job.progress, self._current = Progress.ENTERED, job
        if self._left is None:
            if not self._cache.touch((job.gradient,), job.written):
                return False
            self._left = job.seconds
        if self._left > 1e-12:
            return False
        self._left = self._current = None
        job.progress = Progress.DONE
        self.seconds += job.seconds
        self._cache.leave(job.pieces)
        if not job.ticked:
            self._cache.schedule.fulfil(job.key)
        self._cache.discard((job.gradient,))
        return True

    # -- the training thread ----------------------------------------------------------------------

    def begin(self, jobs: list[Job]) -> None:
        """A step was called. The jobs before are done."""
        assert self._current is None
        self._jobs, self._first = jobs, 0
        self.look()

    def settle(self, jobs: Sequence[Job]) -> None:
        """Do what is left of these, wait for what is being done."""
        cache = self._cache
        for job in jobs:
            if not job.ticked:
                job.ticked = True
                cache.tick(job.key, job.pieces)
            if job.progress is Progress.WAITING:
                job.progress = Progress.DONE
                cache.bring((job.gradient,))
                cache.bring(job.written, Access.WRITE)
                self._two = True
                cache.work(job.seconds, shared=True)
                self._two = False
                self.seconds += job.seconds
                cache.release(job.pieces)
                cache.discard((job.gradient,))
                self.look()
        while any(job.progress is not Progress.DONE for job in jobs):
            cache.wait("update")
