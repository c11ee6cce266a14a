"""Which chunks stay where the same scan over all weights comes again and again: inference.

[Note: A scan]
Where each pass uses every unit once, all orders of eviction that keep as much read the same bytes, but not at the same
time. Belady's keeps whole units next to each other: while those are computed the disk has nothing to do, unless the
read-ahead goes past them, and what it holds for that is taken from what could stay. So a share of every unit is kept
instead, such that no unit lacks more than ``t`` bytes. Then the disk always reads the next unit's ``t`` while one is
computed, two such shares are all that reading ahead takes, and a pass reads

    bytes = sum of min(unit, t),    with the smallest t for which    sum of max(0, unit - t) + 2 t <= room.

Chunks are coarse, so what is left of the room keeps one more of some units, evenly spread over the pass. A unit that is
used at the end of a pass and at the beginning of the next (tied embeddings) is read once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outcore.chunks.chunk import Chunk
from outcore.chunks.replacers import Belady, Rank
from outcore.trace.schedule import Lap, Schedule


def residents(lap: Lap, room: int) -> frozenset[Chunk]:
    """The chunks that stay while a lap repeats itself; none if no choice leaves room to read ahead.

    Args:
        room: bytes for chunks, in use or not.
    """
    least, most = 0, max((sum(c.nbytes for c in tick.needs) for tick in lap.ticks), default=0)
    found: frozenset[Chunk] | None = None
    while least <= most:
        lacking = (least + most) // 2
        kept = _keep(lap, lacking)
        if sum(c.nbytes for c in kept) + _passing(lap, kept) <= room:
            found, most = kept, lacking - 1
        else:
            least = lacking + 1
    if found is None:
        return frozenset()
    left = room - sum(c.nbytes for c in found) - _passing(lap, found)
    return found | _spread(lap, found, left)


def _spread(lap: Lap, kept: frozenset[Chunk], nbytes: int) -> set[Chunk]:
    """Up to one more chunk of each tick, at even distances, ``nbytes`` at the most in all."""
    one_each = {next((c for c in tick.needs if c not in kept), None) for tick in lap.ticks}
    candidates = [c for c in lap.uses if c in one_each]  # in the order of their first use
    total = sum(c.nbytes for c in candidates)
    more: set[Chunk] = set()
    due = 0  # bytes, times the total: shares are exact so
    for chunk in candidates:
        due += chunk.nbytes * min(nbytes, total)
        if due >= chunk.nbytes * total:
            more.add(chunk)
            due -= chunk.nbytes * total
    return more


def _keep(lap: Lap, lacking: int) -> frozenset[Chunk]:
    """As few chunks as leave no tick without more than so many bytes."""
    kept: set[Chunk] = set()
    for tick in lap.ticks:
        missing = sum(c.nbytes for c in tick.needs if c not in kept)
        for chunk in tick.needs:
            if missing <= lacking:
                break
            if chunk not in kept:
                kept.add(chunk)
                missing -= chunk.nbytes
    return frozenset(kept)


def _passing(lap: Lap, kept: frozenset[Chunk]) -> int:
    """The most bytes that two ticks in a row need beside what is kept."""
    needs = [{c for c in tick.needs if c not in kept} for tick in lap.ticks]
    pairs = zip(needs, [*needs[1:], *needs[:1]], strict=True)
    return max(sum(c.nbytes for c in one | other) for one, other in pairs)


class Residents(Belady):
    """For laps that follow themselves: what `residents` keeps leaves last, and never for a read ahead.

    Everything else leaves by `Belady`'s rule, and so does all where no lap follows itself.

    Args:
        room: bytes for chunks, asked for whenever a lap is looked at.
    """

    def __init__(self, schedule: Schedule, room: Callable[[], int]) -> None:
        super().__init__(schedule)
        self._schedule = schedule
        self._room = room
        self._planned: tuple[Lap | None, int] = (None, 0)
        self._kept: frozenset[Chunk] = frozenset()

    def _rank(self, chunk: Chunk) -> Rank:
        return chunk not in self._kept, *super()._rank(chunk)

    def _is_beyond(self, rank: Rank, beyond: int) -> bool:
        return (beyond < 0 or bool(rank[0])) and super()._is_beyond(rank[1:], beyond)

    def _revised(self) -> Iterable[Chunk] | None:
        revised = super()._revised()
        planned = self._schedule.repeated, self._room()
        if planned == self._planned:
            return revised
        self._planned = planned
        self._kept = frozenset() if planned[0] is None else residents(planned[0], planned[1])
        return None
