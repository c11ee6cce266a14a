"""Who takes how many rows: times are given, so what comes of them is known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from outcore.parallel.balance import BySpeed, Even, apportion

Times = Callable[[int, int], list[float]]


def until_done(counts: tuple[int, ...], speeds: list[float]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [3.0, 1.0], [0.1, 0.7, 0.2], [5.0, 4.9, 0.01]])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12])
def test_no_other_division_is_done_earlier(rows: int, speeds: list[float]) -> None:
    found = apportion(rows, speeds)
    assert sum(found) == rows
    others = [c for c in product(range(rows + 1), repeat=len(speeds)) if sum(c) == rows]
    assert until_done(found, speeds) <= min(until_done(c, speeds) for c in others) * (1 + 1e-12)


def test_large_batches_are_divided_to_the_last_row() -> None:
    for rows in (10**6 + 7, 2**53 - 1):
        assert sum(apportion(rows, [1 / 3, 0.1, 7.7])) == rows


def test_even_shares_differ_by_a_row_at_most() -> None:
    assert Even(3).divide(12) == (4, 4, 4)
    assert Even(3).divide(11) == (4, 4, 3)
    assert Even(3).divide(1) == (1, 0, 0)


def train(
    policy: BySpeed, rows: int, steps: int, times: Callable[[int, int], float]
) -> list[tuple[int, ...]]:
    """Divisions of so many steps; ``times`` gives the seconds of a rank for its rows."""
    found = []
    for _ in range(steps):
        division = policy.divide(rows)
        found.append(division)
        run = [max(count, 1) for count in division]
        policy.note(run, [times(rank, count) for rank, count in enumerate(run)])
    return found


def test_a_rank_throttled_to_a_third() -> None:
    """Within 15 % of the ideal division from the third step on: the first says nothing yet, the second tells."""
    for rows in (12, 13, 50, 1024):
        divisions = train(BySpeed(2), rows, 8, lambda rank, count: count * (3.0 if rank else 1.0))
        ideal = rows * 0.75
        for division in divisions[2:]:
            assert max(division[0], 3 * division[1]) <= 1.15 * ideal


def test_what_a_step_takes_apart_from_its_rows_is_balanced_too() -> None:
    """10 s + 1 s a row, and 2 s + 3 s a row: 64 rows are done after 60 s by both at the earliest."""

    def times(rank: int, count: int) -> float:
        return 10.0 + count if rank == 0 else 2.0 + 3.0 * count

    last = train(BySpeed(2), 64, 30, times)[-1]
    assert max(times(0, last[0]), times(1, last[1])) <= 1.05 * 60


def test_drift_is_followed() -> None:
    policy = BySpeed(2)
    assert train(policy, 40, 6, lambda rank, count: count * (3.0 if rank else 1.0))[-1] == (30, 10)
    after = train(policy, 40, 12, lambda rank, count: count * (1.0 if rank else 3.0))
    assert after[0] == (30, 10)
    assert max(3 * after[-1][0], after[-1][1]) <= 1.1 * 30


def test_small_differences_move_nothing() -> None:
    """A division that saves less than it costs is not taken, whoever happens to be ahead."""
    noise = iter([1.03, 0.98, 1.01, 1.0, 0.97, 1.02] * 20)
    assert set(train(BySpeed(2), 100, 30, lambda rank, count: count * next(noise))) == {(50, 50)}


def test_a_part_that_is_larger_than_ever_says_nothing() -> None:
    """Its activations are measured: it takes ten times as long, and no rows are taken away for that."""
    most = [0, 0]

    def times(rank: int, count: int) -> float:
        slow = 10.0 if count > most[rank] else 1.0
        most[rank] = max(most[rank], count)
        return slow * count * (3.0 if rank else 1.0)

    assert train(BySpeed(2), 40, 10, times)[2:] == [(30, 10)] * 8


def test_a_rank_without_rows_comes_back() -> None:
    policy = BySpeed(2)
    assert train(policy, 4, 5, lambda rank, count: count * (100.0 if rank else 1.0))[-1] == (4, 0)
    assert train(policy, 4, 20, lambda rank, count: count)[-1] == (2, 2)
