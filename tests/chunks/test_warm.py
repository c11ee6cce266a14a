"""Pages of gradients stay for the next step where there is room, and those of what leaves go to what comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import LRU
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.frames import Frames
from outcore.memory.host import PAGE, reserve
from outcore.memory.ledger import Ledger
from outcore.trace.schedule import Schedule

ROOM = 4


@pytest.fixture
def pool() -> Iterator[Pool]:
    ledger = Ledger()
    disk = DiskTier([MemoryFile(name="memory")], ledger=ledger, budget=1 << 20)
    made = Pool(ledger, disk, ROOM * PAGE, Schedule(), LRU())
    yield made
    made.close()
    disk.close()
    assert made.used == ledger.held("host") == 0


def chunk(name: str) -> Chunk:
    return Chunk(Kind.GRADIENT, name, reserve(PAGE))


def write(pool: Pool, *chunks: Chunk, value: int = 7) -> None:
    with pool.guard(chunks, Access.FRESH):
        for each in chunks:
            each.region.tensor.fill_(value)


def test_pages_of_a_discarded_chunk_stay_and_read_as_zeros(pool: Pool) -> None:
    gradient = chunk("g")
    write(pool, gradient)
    pool.discard([gradient])
    assert gradient.residence is Residence.EMPTY
    assert pool.used == pool.warm == PAGE
    assert gradient.region.tensor.eq(7).all()  # the same pages: nobody cleared them
    for access in (Access.FRESH, Access.READ):
        with pool.guard([gradient], access):
            assert pool.used == PAGE
            assert pool.warm == 0
            assert gradient.region.tensor.eq(0).all()
        pool.discard([gradient])


def test_they_go_before_any_chunk_does(pool: Pool) -> None:
    gradients = [chunk(f"g{k}") for k in range(2)]
    others = [chunk(f"o{k}") for k in range(4)]
    write(pool, *gradients)
    pool.discard(gradients)
    write(pool, *others[:2])
    assert pool.warm == 2 * PAGE
    write(pool, others[2])
    assert pool.warm == PAGE
    assert all(other.on_host for other in others[:3])
    write(pool, others[3])
    assert pool.warm == 0
    assert all(other.on_host for other in others)


def test_activations_get_their_room(pool: Pool) -> None:
    gradients = [chunk(f"g{k}") for k in range(ROOM)]
    write(pool, *gradients)
    pool.discard(gradients)
    pool.reserve(3 * PAGE, 3 * PAGE)
    assert pool.used == pool.warm == PAGE
    pool.borrow(PAGE)
    assert pool.warm == 0
    assert pool.pinned == PAGE
    pool.repay(PAGE)


def test_none_stay_where_nothing_may(pool: Pool) -> None:
    gradient = chunk("g")
    write(pool, gradient)
    pool.discard([gradient])
    pool.hold_idle(False)
    assert pool.used == 0
    write(pool, gradient)
    pool.discard([gradient])
    assert pool.used == 0


# -- frames -------------------------------------------------------------------------------------------


def framed(*sizes: int) -> list[Chunk]:
    frames = Frames()
    return [Chunk(Kind.STATE, f"s{k}", frames.place(size * PAGE)) for k, size in enumerate(sizes)]


def test_what_is_read_takes_over_the_pages_of_what_leaves(pool: Pool) -> None:
    chunks = framed(*[1] * (ROOM + 2))
    for k, each in enumerate(chunks):
        write(pool, each, value=k + 1)
    here = {each.region.tensor.data_ptr() for each in chunks if each.on_host}
    assert len(here) == ROOM
    for k in (0, 1, *range(ROOM + 2)):
        with pool.guard([chunks[k]], Access.READ):
            assert chunks[k].region.tensor.eq(k + 1).all()
            assert chunks[k].region.tensor.data_ptr() in here  # nothing was given back or taken
        assert pool.used == ROOM * PAGE


def test_an_empty_chunk_finds_zeros_in_another_ones_pages(pool: Pool) -> None:
    old, new = framed(1, 1)
    write(pool, old)
    pool.discard([old])
    with pool.guard([new], Access.READ):
        assert pool.warm == 0
        assert new.region.tensor.eq(0).all()


def test_one_that_returns_before_its_pages_were_given_on_is_read_into_them(pool: Pool) -> None:
    chunks = framed(1, 1)
    write(pool, *chunks)
    pool.discard([chunks[1]])
    assert pool.warm == PAGE
    write(pool, chunks[1], value=3)
    assert pool.warm == 0
    with pool.guard(chunks, Access.READ):
        assert [int(each.region.tensor[-1]) for each in chunks] == [7, 3]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    uses=st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True),
            st.sampled_from([Access.READ, Access.FRESH, None]),
        ),
        max_size=30,
    )
)
def test_chunks_of_different_sizes_share_frames_within_the_ceiling(
    uses: list[tuple[list[int], Access | None]],
) -> None:
    ledger = Ledger()
    disk = DiskTier([MemoryFile(name="memory")], ledger=ledger, budget=1 << 20)
    pool = Pool(ledger, disk, 16 * PAGE, Schedule(), LRU())
    chunks = framed(5, 6, 7, 8, 5, 6, 8, 8)
    holds = dict.fromkeys(range(8), 0)
    for number, (chosen, access) in enumerate(uses, 1):
        those = [chunks[k] for k in chosen]
        if access is None:
            pool.discard(those)
            holds.update(dict.fromkeys(chosen, 0))
            continue
        with pool.guard(those, access):
            assert pool.used <= pool.ceiling
            for k in chosen:
                if access is Access.FRESH:
                    chunks[k].region.tensor.fill_(number)
                    holds[k] = number
                assert chunks[k].region.tensor.eq(holds[k]).all()
        assert pool.used == sum(each.nbytes for each in chunks if each.on_host) + pool.warm
    assert ledger.snapshot().peak["host"] <= 16 * PAGE
    pool.close()
    disk.close()
    assert ledger.held("host") == 0


def test_a_smaller_chunk_in_the_pages_of_a_larger_one_makes_room(pool: Pool) -> None:
    old, new = framed(4, 3)
    write(pool, old)
    pool.discard([old])
    pool._core.room.reserved = PAGE  # more is held than may be, and nothing was asked to leave yet
    with pool.guard([new], Access.READ):
        assert pool.used == 3 * PAGE


def test_a_gradient_that_is_to_come_does_not_stop_the_reading(pool: Pool) -> None:
    chunks = framed(1, 1, 1, 1)
    write(pool, *chunks)
    others = framed(1, 1, 1, 1)
    write(pool, *others)
    pool.discard(others)
    (gradient,) = framed(1)
    with pool.lock:
        schedule: Any = pool._core._order
        for _ in range(2):
            schedule.begin("lap")
            for k, each in enumerate((gradient, *chunks)):
                schedule.advance(k, [each])
        schedule.begin("lap")
        assert not chunks[0].on_host
        pool.advance()
    pool.quiesce()
    assert chunks[0].on_host
