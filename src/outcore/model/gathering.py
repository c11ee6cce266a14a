"""Parameters of which each rank keeps a slice, gathered for use: in which order, and what comes ahead.

[Note: Ahead]
While one unit computes the next one is gathered, by a thread and over connections of their own. Each rank says, with
the header of a gather, which unit it expects next and has a slice and room for; if all say the same it comes, else
it comes when it is asked for. So ranks whose disks or updates are behind delay each other no more than without it, and
memory is never taken from what is needed sooner. A unit that came and is not used next leaves.

[Note: Twice in a row]
The last unit of a forward is the first of its backward. Where all ranks expect that, and have room for it meanwhile, it
does not leave between, and is gathered once: they say so with the same word.

All of this depends only on the order in which units are asked for, which all ranks have in common. Where gathered
parameters lie, and what becomes of them on a device, is each rank's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from outcore.errors import PeerError
from outcore.memory.ledger import WIRE, Ledger
from outcore.model.summing import Summing
from outcore.model.unit import Unit
from outcore.optim.updates import Updates
from outcore.trace.clock import Clock

NEXT = 64
"""Ticks among which the next use is looked for: there are updates between them."""


class Frames(Protocol):
    """Where gathered parameters lie."""

    def take(self, unit: Unit) -> None:
        """Make room for a unit and bring this rank's slice; one that can't be brought is not there."""

    def take_ahead(self, unit: Unit, distance: int) -> bool:
        """The same for a use in so many ticks, if nothing that is needed sooner must leave for it."""

    def gather(self, unit: Unit, what: str) -> Future[None]:
        """Bring the slices of the others; all ranks have agreed to this, and taken the unit."""

    def give_back(self, unit: Unit) -> None:
        """The values are not needed any more."""

    def may_stay(self, unit: Unit) -> bool:
        """Whether there is room for a unit's values until its next use, if that is the next of all."""

    def shut(self) -> None:
        """No more gathers come."""


@dataclass(frozen=True)
class Coming:
    """A unit that is being gathered before it is asked for."""

    unit: Unit
    arrival: Future[None]


class Gathering:
    """Gathers units in the order in which all ranks ask for them; see [Note: Ahead].

    Args:
        units: all units, in the order of their numbers.
        updates: what is due has no values to gather yet.
        stays: what is used twice in a row stays, see [Note: Twice in a row].
    """

    def __init__(
        self,
        units: Sequence[Unit],
        frames: Frames,
        summing: Summing,
        clock: Clock,
        ledger: Ledger,
        updates: Updates,
        stays: bool = False,
    ) -> None:
        self._units = units
        self._frames = frames
        self._summing = summing
        self._clock = clock
        self._ledger = ledger
        self._updates = updates
        self._here: set[Unit] = set()
        self._coming: Coming | None = None
        self._stays = stays
        self._staying: Unit | None = None

    def has(self, unit: Unit) -> bool:
        """Whether all of a unit's values have been gathered."""
        coming = self._coming
        if coming is not None and coming.unit is unit:
            return coming.arrival.done() and coming.arrival.exception() is None
        return unit in self._here

    def open(self, unit: Unit) -> None:
        """All ranks are about to use a unit: its values are there afterwards."""
        what = f"the gather of {unit.name or 'the model'}"
        if self._coming is not None and self._coming.unit is not unit:
            self.give_back(self._coming.unit)  # another unit was expected, by all ranks
        staying, self._staying = self._staying, None
        if staying is not None and staying is not unit:
            self.leave(staying)  # likewise
        coming, self._coming = self._coming, None
        absent = unit not in self._here
        if absent:
            self._frames.take(unit)
            self._here.add(unit)
        try:
            if absent or coming is not None or self._summing.eager:
                following = self._propose(unit)
                agreed = self._summing.agree(what, 0 if following is None else following.index + 1)
                if following is not None and not agreed:
                    if following is not unit:
                        self.give_back(following)
                    following = None
                if absent:
                    coming = Coming(unit, self._frames.gather(unit, what))
                if following is unit:
                    self._staying = unit
                elif following is not None:
                    ahead = f"the gather of {following.name} ahead of its use"
                    self._coming = Coming(following, self._frames.gather(following, ahead))
            if coming is not None:
                self._await(coming)
        except BaseException:
            if absent:
                self.give_back(unit)
            raise

    def close(self, unit: Unit) -> None:
        """A use is over."""
        if unit is not self._staying:
            self.leave(unit)

    def leave(self, unit: Unit) -> None:
        """The unit's values, if they are here, are worth nothing any more."""
        if unit in self._here:
            self.give_back(unit)

    def give_back(self, unit: Unit) -> None:
        coming = self._coming
        try:
            if coming is not None and coming.unit is unit:
                self._coming = None
                self._await(coming)
        finally:
            if self._staying is unit:
                self._staying = None
            self._here.discard(unit)
            self._frames.give_back(unit)

    def shut(self) -> None:
        for unit in tuple(self._here):
            with suppress(PeerError):
                self.give_back(unit)
        self._frames.shut()

    def _await(self, coming: Coming) -> None:
        if coming.arrival.done():
            coming.arrival.result()
            return
        with self._ledger.waiting(WIRE):
            coming.arrival.result()

    def _propose(self, unit: Unit) -> Unit | None:
        """The unit that is used next, if its slice is at hand and there is room: it is taken then."""
        following, distance = self._next_use(unit)
        if following is unit:
            return unit if self._stays and self._frames.may_stay(unit) else None
        if following is None or following in self._here or self._updates.is_due(following.stores):
            return None
        if not all(chunk.ready for chunk in following.parameter_chunks):
            return None
        if not self._frames.take_ahead(following, distance):
            return None
        self._here.add(following)
        return following

    def _next_use(self, unit: Unit) -> tuple[Unit | None, int]:
        """The unit that is used next, and ticks until then; none if a step may come first.

        Between the units of a forward lie the updates of the step before. Behind a backward lie those of its own.
        """
        assert isinstance(self._clock.now, tuple)
        within = self._clock.now[0] == "forward"
        for distance, key in self._clock.upcoming(NEXT):
            assert isinstance(key, tuple)
            if key[0] in ("forward", "backward"):
                found = self._units[key[1]]
                return found, distance
            if key[0] != "update" or not within:
                break
        return None, 0
