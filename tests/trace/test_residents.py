"""What stays while a scan repeats itself, held against the bytes it may take and the bytes it then reads."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.replacers import Replacer
from outcore.memory.host import PAGE, reserve
from outcore.trace.residents import Residents, residents
from outcore.trace.schedule import Lap, Schedule, Tick


def scan(sizes: list[int], tied: bool = False) -> Lap:
    """Units of so many pages, each page a chunk; the first one again at the end if ``tied``."""
    units = [
        tuple(Chunk(Kind.PARAMETER, f"{u}.{k}", reserve(PAGE)) for k in range(n)) for u, n in enumerate(sizes)
    ]
    return Lap([Tick(u, chunks) for u, chunks in enumerate([*units, *units[: int(tied)]])])


def missing(lap: Lap, kept: frozenset[Chunk]) -> list[int]:
    """Pages of each tick that are not kept."""
    return [sum(chunk not in kept for chunk in tick.needs) for tick in lap.ticks]


def test_every_unit_lacks_the_same_share() -> None:
    lap = scan([8] * 10)
    kept = residents(lap, 48 * PAGE)
    assert missing(lap, kept) == [4] * 10  # 40 stay, and two shares of 4 pass


def test_what_chunks_leave_over_is_spread_evenly() -> None:
    lap = scan([5] * 12)
    lacking = missing(lap, residents(lap, 38 * PAGE))
    assert set(lacking) == {2, 3}
    assert sum(lacking) == 28  # 60 - 38 + 6 that pass
    assert all(set(lacking[k : k + 3]) == {2, 3} for k in range(10))


def test_tied_weights_are_kept_no_more_than_others() -> None:
    lap = scan([12, *[4] * 8], tied=True)
    lacking = missing(lap, residents(lap, 24 * PAGE))
    assert lacking[0] == lacking[-1] == max(lacking)


def test_nothing_is_kept_where_two_units_hardly_fit() -> None:
    assert residents(scan([8, 8, 8]), 15 * PAGE) == frozenset()
    assert len(residents(scan([8, 8, 8]), 24 * PAGE)) == 24


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.booleans(), st.integers(1, 120))
def test_two_ticks_in_a_row_always_fit_beside_what_is_kept(sizes: list[int], tied: bool, room: int) -> None:
    lap = scan(sizes, tied)
    kept = residents(lap, room * PAGE)
    if not kept:
        return
    ticks = [*lap.ticks, lap.ticks[0]]
    for one, other in pairwise(ticks):
        assert len(kept | set(one.needs) | set(other.needs)) <= room


@pytest.fixture
def repeated() -> tuple[Schedule, list[Chunk]]:
    lap = scan([1] * 6)
    schedule = Schedule()
    for _ in range(2):
        schedule.begin("forward")
        for tick in lap.ticks:
            schedule.advance(tick.key, tick.needs)
    schedule.begin("forward")
    chunks = [chunk for tick in lap.ticks for chunk in tick.needs]
    for chunk in chunks:
        chunk.residence = Residence.CLEAN
    return schedule, chunks


def test_what_is_kept_leaves_last_and_never_for_a_read_ahead(
    repeated: tuple[Schedule, list[Chunk]],
) -> None:
    schedule, chunks = repeated
    replacer = Residents(schedule, lambda: 5 * PAGE)
    kept = residents(scan_of(schedule), 5 * PAGE)
    assert len(kept) == 3
    passing = [chunk for chunk in chunks if chunk not in kept]
    assert leaving(replacer, chunks, 0) == passing[::-1]
    assert set(leaving(replacer, chunks, -1)[: len(passing)]) == set(passing)
    assert set(leaving(replacer, chunks, -1)[len(passing) :]) == kept


def test_other_laps_are_left_to_belady(repeated: tuple[Schedule, list[Chunk]]) -> None:
    schedule, chunks = repeated
    schedule.begin("other")
    schedule.begin("forward")
    assert schedule.repeated is None
    assert leaving(Residents(schedule, lambda: 5 * PAGE), chunks, -1) == chunks[::-1]


def leaving(replacer: Replacer, chunks: list[Chunk], beyond: int) -> list[Chunk]:
    for chunk in chunks:
        replacer.offer(chunk)
    return list(replacer.leaving(lambda chunk: True, beyond))


def scan_of(schedule: Schedule) -> Lap:
    lap = schedule.repeated
    assert lap is not None
    return lap
