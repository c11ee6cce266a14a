"""Who goes first, who waits, and what happens when transfers end late and in any order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from waited import write_now

from faulty import Fault, FaultyFile
from outcore.errors import DiskWriteError, StateError
from outcore.memory.blockfile import BLOCK, MemoryFile
from outcore.memory.disk import DiskTier, Extent
from outcore.memory.lane import READS_PER_WRITE
from outcore.memory.ledger import Ledger

MiB = 1 << 20


def fill(letter: int, blocks: int = 1) -> memoryview:
    return memoryview(bytes([letter]) * (blocks * BLOCK))


@pytest.fixture
def file() -> Iterator[FaultyFile]:
    file = FaultyFile(MemoryFile())
    yield file
    file.resume()


def open_tier(file: FaultyFile, threads: int = 1, queue_bytes: int = 64 * MiB) -> DiskTier:
    return DiskTier(
        [file], ledger=Ledger(), budget=MiB, threads=threads, request_bytes=BLOCK, queue_bytes=queue_bytes
    )


def written(tier: DiskTier, count: int) -> list[Extent]:
    extents = [tier.allocate(BLOCK) for _ in range(count)]
    for k, extent in enumerate(extents):
        write_now(tier, extent, fill(k))
    return extents


def test_reads_overtake_writes_which_still_get_their_turn(file: FaultyFile) -> None:
    with open_tier(file) as tier:
        old = written(tier, 8)
        new = [tier.allocate(BLOCK) for _ in range(4)]
        file.pause()
        futures = [tier.write(new[0], fill(0))]
        file.wait_for(1)  # the only thread is busy; what follows is queued
        start = len(file.log)
        futures += [tier.write(extent, fill(1)) for extent in new[1:]]
        futures += [tier.read(extent, memoryview(bytearray(BLOCK))) for extent in old]
        file.resume()
        for future in futures:
            future.result(30)
        kinds = [kind for kind, _ in file.log[start:]]
        group = ["read"] * READS_PER_WRITE + ["write"]
        assert kinds == [*group, *group, "read", "read", "write"]
        reads = [offset for kind, offset in file.log[start:] if kind == "read"]
        assert reads == [extent.offset for extent in old]  # the oldest first


@pytest.mark.parametrize("seed", range(8))
def test_completions_in_any_order(file: FaultyFile, seed: int) -> None:
    with open_tier(file, threads=4) as tier:
        extents = [tier.allocate(n * BLOCK) for n in (1, 2, 3, 4, 5)]
        file.pause()
        writes = [tier.write(e, fill(k, e.space // BLOCK)) for k, e in enumerate(extents)]
        file.finish_shuffled(seed, writes, width=4)
        file.pause()
        backs = [bytearray(e.nbytes) for e in extents]
        reads = [tier.read(e, memoryview(b)) for e, b in zip(extents, backs, strict=True)]
        file.finish_shuffled(seed, reads, width=4)
        for future in writes + reads:
            future.result(30)
        assert all(back == fill(k, len(back) // BLOCK) for k, back in enumerate(backs))


def test_a_future_is_not_done_before_its_last_piece(file: FaultyFile) -> None:
    with open_tier(file, threads=4) as tier:
        extent = tier.allocate(4 * BLOCK)
        file.pause()
        writing = tier.write(extent, fill(1, 4))
        for _ in range(3):
            file.wait_for(1)
            file.let(0)
        file.wait_for(1)
        assert not writing.done()
        assert not writing.cancel()
        assert tier.stalled()
        file.resume()
        writing.result(30)
        assert not tier.stalled()


def test_conflicting_transfers_of_one_extent_are_refused(file: FaultyFile) -> None:
    with open_tier(file, threads=2) as tier:
        (extent,) = written(tier, 1)
        back = memoryview(bytearray(BLOCK))
        file.pause()
        writing = tier.write(extent, fill(7))
        for conflict in (
            lambda: tier.read(extent, back),
            lambda: tier.write(extent, fill(8)),
            lambda: tier.free(extent),
        ):
            with pytest.raises(StateError, match="under way"):
                conflict()
        file.resume()
        writing.result(30)
        file.pause()
        reads = [tier.read(extent, back), tier.read(extent, memoryview(bytearray(BLOCK)))]
        with pytest.raises(StateError, match="under way"):
            tier.write(extent, fill(8))
        file.resume()
        for reading in reads:
            reading.result(30)
        write_now(tier, extent, fill(8))
        assert not tier.stalled()


# -- backpressure ---------------------------------------------------------------------------------


def test_writes_wait_for_room_in_the_queue(file: FaultyFile) -> None:
    with open_tier(file, queue_bytes=2 * BLOCK) as tier:
        extents = [tier.allocate(BLOCK) for _ in range(3)]
        file.pause()
        futures = [tier.write(extent, fill(1)) for extent in extents[:2]]
        third = threading.Event()

        def write_more() -> None:
            futures.append(tier.write(extents[2], fill(1)))
            third.set()

        thread = threading.Thread(target=write_more)
        thread.start()
        file.wait_for(1)
        assert not third.wait(0.05)
        file.let(0)
        assert third.wait(30)
        thread.join()
        file.resume()
        for future in futures:
            future.result(30)


def test_a_write_larger_than_the_queue_goes_alone(file: FaultyFile) -> None:
    with open_tier(file, queue_bytes=BLOCK) as tier:
        extent = tier.allocate(16 * BLOCK)
        tier.write(extent, fill(1, 16)).result(30)


def test_callbacks_may_write_while_the_queue_is_full(file: FaultyFile) -> None:
    with open_tier(file, threads=2, queue_bytes=BLOCK) as tier:
        extents = [tier.allocate(BLOCK) for _ in range(20)]
        left, over = iter(extents), threading.Event()

        def write_next(_: Future[None] | None) -> None:
            extent = next(left, None)
            if extent is None:
                over.set()
            else:
                tier.write(extent, fill(1)).add_done_callback(write_next)

        write_next(None)
        assert over.wait(30)


def test_a_waiting_writer_may_hold_a_lock_that_callbacks_need(file: FaultyFile) -> None:
    lock = threading.Lock()
    calls = []

    def callback(done: Future[None]) -> None:
        with lock:
            calls.append(done)

    with open_tier(file, threads=2, queue_bytes=BLOCK) as tier:
        extents = [tier.allocate(2 * BLOCK) for _ in range(20)]
        with lock:
            for extent in extents:
                tier.write(extent, fill(1, 2)).add_done_callback(callback)
    assert len(calls) == 20


def test_a_failed_write_frees_its_room_in_the_queue() -> None:
    file = FaultyFile(MemoryFile(), [Fault("write", 1, "eio", forever=True)])
    with open_tier(file, threads=2, queue_bytes=4 * BLOCK) as tier:
        extents = [tier.allocate(4 * BLOCK) for _ in range(20)]
        for future in [tier.write(extent, fill(1, 4)) for extent in extents]:
            with pytest.raises(DiskWriteError):
                future.result(30)
        assert file.counts["write"] < 80  # pieces that had not begun were given up


def test_closing_wakes_a_waiting_writer(file: FaultyFile) -> None:
    tier = open_tier(file, queue_bytes=BLOCK)
    extents = [tier.allocate(BLOCK) for _ in range(2)]
    file.pause()
    tier.write(extents[0], fill(1))
    file.wait_for(1)
    caught: list[BaseException] = []

    def write_more() -> None:
        try:
            tier.write(extents[1], fill(1))
        except StateError as error:
            caught.append(error)

    writer = threading.Thread(target=write_more)
    writer.start()
    closer = threading.Thread(target=tier.close)
    closer.start()
    writer.join(30)
    assert len(caught) == 1
    file.resume()
    closer.join(30)
    assert not closer.is_alive()


def test_a_callback_cant_close(file: FaultyFile) -> None:
    with open_tier(file) as tier:
        caught: list[BaseException] = []
        over = threading.Event()

        def close(_: Future[None]) -> None:
            try:
                tier.close()
            except StateError as error:
                caught.append(error)
            over.set()

        tier.write(tier.allocate(BLOCK), fill(1)).add_done_callback(close)
        assert over.wait(30)
        assert len(caught) == 1
        write_now(tier, tier.allocate(BLOCK), fill(1))
