"""A route as the policies of `outcore.chunks` see it: from where the run is."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.chunks.chunk import Chunk
from outcore.chunks.replacers import NEVER
from outcore.planning.flow import Piece
from outcore.planning.route import Route
from outcore.trace.schedule import Schedule


class Course:
    """What a run that is at a tick of a route believes of those to come. Is `outcore.chunks.replacers.Order`.

    Attributes:
        now: the position of the run.
        epoch: counts how often it began to believe something else.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._revised: set[Chunk] | None = None
        self._excused: list[int] = []
        self.now = -1
        self.epoch = 0

    def believe(self, route: Route) -> None:
        """From now on another order is expected."""
        if route is not self._route:
            self._route = route
            self._begin_anew()

    def advance(self, position: int) -> None:
        """The run is at this tick."""
        if position <= self.now or self._route.lap(max(position, 0)) != self._route.lap(max(self.now, 0)):
            self._begin_anew()  # another lap comes into sight, or updates were done ahead of their ticks
        if self._revised is not None:
            for passed in range(self.now + 1, position + 1):
                self._revised.update(self._route.at(passed))
        self.now = position
        self._route.pass_by(position)

    def fulfil(self, position: int) -> None:
        """The tick at this position has nothing left to do when it comes."""
        self._route.fulfil(position)
        self._excused.append(position)
        if self._revised is not None:
            self._revised.update(self._route.at(position))

    def _begin_anew(self) -> None:
        self.epoch += 1
        self._revised = None

    def revised(self) -> set[Chunk] | None:
        changed, self._revised = self._revised, set()
        return changed

    def excused(self) -> list[int]:
        excused, self._excused = self._excused, []
        return excused

    def next_use(self, chunk: Chunk) -> int:
        assert isinstance(chunk, Piece)
        position = self._route.next_use(chunk, self.now)
        return NEVER if position >= NEVER else position - self.now

    def needs(self, distance: int) -> Sequence[Piece] | None:
        position = self.now + distance
        if self._route.lap(position) - self._route.lap(max(self.now, 0)) > Schedule.HORIZON:
            return None
        return () if self._route.is_done(position) else self._route.at(position)
