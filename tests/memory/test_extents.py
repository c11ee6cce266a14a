from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outcore.memory.blockfile import BLOCK
from outcore.memory.extents import Extent, Space, blocks

CAPACITY = 64 * BLOCK
STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 100)), max_size=60)


@given(STEPS)
def test_ranges_never_overlap_and_holes_join_again(steps: list[tuple[bool, int, int]]) -> None:
    space = Space(CAPACITY + 17)
    live: dict[int, int] = {}
    for take, count, pick in steps:
        if take or not live:
            start = space.take(count * BLOCK)
            if start is None:
                assert space.largest < count * BLOCK
                continue
            assert start % BLOCK == 0
            assert start + count * BLOCK <= CAPACITY
            assert all(
                start + count * BLOCK <= other or other + size <= start for other, size in live.items()
            )
            live[start] = count * BLOCK
        else:
            start = sorted(live)[pick % len(live)]
            space.give(start, live.pop(start))
        assert space.used == sum(live.values())
        assert sum(space._sizes) + space.used == CAPACITY
    for start, size in live.items():
        space.give(start, size)
    assert space.largest == CAPACITY


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_same_sizes_again_need_no_more_space(sizes: list[int], chance: object) -> None:
    space = Space(1000 * BLOCK)
    starts = [space.take(size * BLOCK) for size in sizes]
    high = sum(sizes) * BLOCK
    for _ in range(3):
        order = list(range(len(sizes)))
        chance.shuffle(order)  # type: ignore[attr-defined]
        for k in order[: len(order) // 2]:
            start = starts[k]
            assert start is not None
            space.give(start, sizes[k] * BLOCK)
        for k in order[: len(order) // 2]:
            starts[k] = space.take(sizes[k] * BLOCK)
        ends = [start + size * BLOCK for start, size in zip(starts, sizes, strict=True) if start is not None]
        assert max(ends) <= 2 * high  # different sizes may splinter, equal ones never do
        if len(set(sizes)) == 1:
            assert max(ends) == high


def test_a_hole_of_the_right_size_comes_first() -> None:
    space = Space(CAPACITY)
    a, b, c, _ = (space.take(n * BLOCK) for n in (3, 1, 2, 1))
    assert (a, b, c) == (0, 3 * BLOCK, 4 * BLOCK)
    space.give(0, 3 * BLOCK)
    space.give(4 * BLOCK, 2 * BLOCK)
    assert space.take(2 * BLOCK) == 4 * BLOCK
    assert space.take(2 * BLOCK) == 0


def test_an_extent_takes_whole_blocks() -> None:
    assert [blocks(n) for n in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]
    assert Extent(5000, 0, 0).space == 2 * BLOCK


def test_a_file_without_room() -> None:
    assert Space(BLOCK - 1).take(BLOCK) is None
