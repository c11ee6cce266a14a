"""A pool that holds nothing idle has given the bytes back when it says so."""

from __future__ import annotations

import threading

import pytest

from faulty import FaultyFile
from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import LRU
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.host import PAGE, reserve
from outcore.memory.ledger import Ledger
from outcore.trace.schedule import Schedule


@pytest.mark.parametrize("call", ["hold_idle", "advance"])
def test_bytes_being_written_are_waited_for(call: str) -> None:
    """Otherwise what a measured lap allocates next comes on top of them, beyond the budget."""
    file = FaultyFile(MemoryFile(name="memory"), [])
    ledger = Ledger()
    disk = DiskTier([file], ledger=ledger, budget=1 << 20)
    pool = Pool(ledger, disk, 4 * PAGE, Schedule(), LRU())
    if call == "advance":
        pool.hold_idle(False)
    chunk = Chunk(Kind.STATE, "c", reserve(PAGE))
    with pool.guard([chunk], Access.FRESH):
        chunk.region.tensor.fill_(7)
    file.pause()
    left: list[int] = []

    def act() -> None:
        pool.hold_idle(False) if call == "hold_idle" else pool.advance()
        left.append(pool.used)

    thread = threading.Thread(target=act)
    thread.start()
    file.wait_for(1)
    file.resume()
    thread.join(30)
    assert left == [0]
    with pool.guard([chunk], Access.READ):
        assert chunk.region.tensor.eq(7).all()
    pool.close()
    disk.close()
