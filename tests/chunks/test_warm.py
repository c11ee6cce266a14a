"""Pages of gradients stay for the next step where there is room, and are no obstacle where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import LRU
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
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
