from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.replacers import NEVER
from outcore.memory.host import reserve
from outcore.trace.schedule import Schedule


def test_laps_in_a_row_are_counted_so_far_and_no_further() -> None:
    """A plain loop has a million of them, and a record for each would be kept for good."""
    schedule = Schedule()
    for _ in range(3 * Schedule.IN_A_ROW):
        schedule.begin("lap")
    assert len(schedule._follows) <= Schedule.IN_A_ROW + 1


@pytest.fixture(scope="module")
def chunks() -> list[Chunk]:
    return [Chunk(Kind.PARAMETER, f"c{i}", reserve(4096)) for i in range(8)]


def play(schedule: Schedule, key: str, uses: Iterable[int], chunks: list[Chunk]) -> None:
    schedule.begin(key)
    for i in uses:
        schedule.advance(i, (chunks[i],))


def coming(schedule: Schedule) -> list[str]:
    """The names of all that is needed after now, each time it is."""
    found: list[str] = []
    for distance in count(1):
        needs = schedule.needs(distance)
        if needs is None:
            return found
        found += [chunk.name for chunk in needs]
    raise AssertionError


def test_nothing_is_foreseen_in_the_first_lap(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    play(schedule, "f", [0, 1, 2], chunks)
    assert schedule.next_use(chunks[0]) == NEVER
    assert coming(schedule) == []


def test_the_second_lap_is_the_first_again(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    play(schedule, "f", [0, 1, 2, 1, 0], chunks)
    play(schedule, "f", [0], chunks)
    assert schedule.next_use(chunks[1]) == 1
    assert schedule.next_use(chunks[2]) == 2
    assert schedule.next_use(chunks[0]) == 4
    assert coming(schedule)[:5] == ["c1", "c2", "c1", "c0", "c0"]


def test_micro_batches_and_the_step_after_them_are_foreseen(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    for _ in range(2):
        play(schedule, "f", [0, 1], chunks)
        play(schedule, "f", [0, 1], chunks)
        play(schedule, "u", [5], chunks)
    play(schedule, "f", [0, 1], chunks)
    assert schedule.next_use(chunks[5]) == 3  # 0, 1, then the update
    play(schedule, "f", [0, 1], chunks)
    assert schedule.next_use(chunks[5]) == 1


def test_a_skipped_use_moves_the_cursor_on(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    play(schedule, "f", [0, 1, 2, 3], chunks)
    play(schedule, "f", [0, 2], chunks)
    assert schedule.next_use(chunks[3]) == 1
    play(schedule, "f", [0], chunks)
    assert schedule.next_use(chunks[2]) == 1  # the changed lap is the record now


def test_an_unknown_use_leaves_the_cursor(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    play(schedule, "f", [0, 1, 2], chunks)
    play(schedule, "f", [0, 7], chunks)
    assert schedule.next_use(chunks[1]) == 1


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=6))
def test_a_repeated_order_is_foretold_exactly(orders: list[list[int]]) -> None:
    pages = [Chunk(Kind.STATE, f"c{i}", reserve(4096)) for i in range(8)]
    schedule = Schedule()
    for _ in range(2):
        for number, order in enumerate(orders):
            play(schedule, f"lap {number}", order, pages)
    flat = [i for order in orders for i in order] * 2
    schedule.begin("lap 0")
    for position, i in enumerate(orders[0], start=1):
        schedule.advance(i, (pages[i],))
        for c in range(8):
            if c in flat[position:] and len(orders) <= Schedule.HORIZON:
                assert schedule.next_use(pages[c]) == flat[position:].index(c) + 1


def test_a_use_that_was_over_ahead_of_its_tick_is_foreseen_no_more(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    for _ in range(2):
        play(schedule, "f", [0, 1, 2], chunks)
    schedule.begin("f")
    assert schedule.next_use(chunks[1]) == 2
    schedule.fulfil(1)
    assert schedule.next_use(chunks[1]) == 5  # in the lap after this one
    assert coming(schedule)[:2] == ["c0", "c2"]
    for i in (0, 1, 2):
        schedule.advance(i, (chunks[i],))
    assert schedule.next_use(chunks[1]) == 2
    assert coming(schedule)[:3] == ["c0", "c1", "c2"]


def test_a_use_fulfilled_before_its_lap_begins(chunks: list[Chunk]) -> None:
    schedule = Schedule()
    for _ in range(2):
        play(schedule, "f", [0, 1], chunks)
    schedule.fulfil(0)
    assert schedule.next_use(chunks[0]) == 3
    play(schedule, "f", [0], chunks)
    assert schedule.next_use(chunks[0]) == 2


@pytest.mark.parametrize("begun", [True, False])
def test_a_lap_that_nobody_ends_is_cut(
    begun: bool, chunks: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "LONGEST", 4)
    schedule = Schedule()
    if begun:
        schedule.begin("f")
    for number in range(50):
        schedule.advance(number % 4, (chunks[number % 4],))
        assert len(schedule._seen) <= 4
    if begun:
        assert coming(schedule)[:4] == ["c2", "c3", "c0", "c1"]
