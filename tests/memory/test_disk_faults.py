"""Every fault, at every operation: a typed error or the right bytes, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from small_disk import small_disk
from waited import read_now, write_now

from faulty import KINDS, Fault, FaultyFile, Kind, Operation
from outcore.errors import (
    CorruptionError,
    DiskFullError,
    DiskReadError,
    DiskWriteError,
    StateError,
    TierError,
)
from outcore.memory.blockfile import BLOCK, BlockFile, DirectFile, MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger

__all__ = ["small_disk"]

MIB = 1 << 20
SIZES = (BLOCK, 5 * BLOCK, 2 * BLOCK + 100)


def pattern(seed: int, nbytes: int) -> bytes:
    return bytes((seed * 37 + k * 11 + k // 251) % 256 for k in range(251)) * (nbytes // 251 + 1)


def workload(tier: DiskTier) -> None:
    """Write, read, overwrite, read, free, and use the space again; what is read is compared."""
    extents = [tier.allocate(n) for n in SIZES]
    for turn in range(2):
        sources = [reserve(n).buffer[:n] for n in SIZES]
        for k, source in enumerate(sources):
            source[:] = pattern(3 * turn + k, len(source))[: len(source)]
        writes = [tier.write(e, s) for e, s in zip(extents, sources, strict=True)]
        for future in writes:
            future.result(30)
        backs = [reserve(n).buffer[:n] for n in SIZES]
        reads = [tier.read(e, b) for e, b in zip(extents, backs, strict=True)]
        for future in reads:
            future.result(30)
        assert backs == sources
    tier.free(extents[1])
    again = tier.allocate(7 * BLOCK)
    data = bytearray(pattern(9, 7 * BLOCK)[: 7 * BLOCK])
    write_now(tier, again, memoryview(data))
    back = bytearray(7 * BLOCK)
    read_now(tier, again, memoryview(back))
    assert back == data


def run(inner: BlockFile, faults: Sequence[Fault]) -> tuple[FaultyFile, TierError | None]:
    file = FaultyFile(inner, faults)
    caught = None
    ledger = Ledger()
    with DiskTier([file], ledger=ledger, budget=64 * BLOCK, threads=2, request_bytes=2 * BLOCK) as tier:
        try:
            workload(tier)
        except TierError as error:
            caught = error
    assert file.closed
    assert not tier.stalled()
    assert ledger.held("disk") == 0
    return file, caught


def test_the_workload_passes_without_faults() -> None:
    file, caught = run(MemoryFile(), ())
    assert caught is None
    assert min(file.counts.values()) >= 4


CASES = [
    (operation, kind, forever)
    for operation, kinds in KINDS.items()
    for kind in kinds
    for forever in (False, True)
    if (kind, forever)
    != ("eintr", True)  # a system that interrupts for ever makes no progress, by definition
]


@pytest.mark.parametrize(("operation", "kind", "forever"), CASES)
def test_every_operation_fails_once_or_for_ever(operation: Operation, kind: Kind, forever: bool) -> None:
    threads = set(threading.enumerate())
    count = run(MemoryFile(), ())[0].counts[operation]
    outcomes = []
    for at in range(1, count + 1):
        file, caught = run(MemoryFile(), [Fault(operation, at, kind, forever)])
        assert file.counts[operation] >= at or caught is not None
        outcomes.append(caught)
    assert set(threading.enumerate()) == threads
    expected: dict[tuple[str, str], type[TierError]] = {
        ("read", "eio"): DiskReadError,
        ("read", "none"): DiskReadError,
        ("write", "eio"): DiskWriteError,
        ("write", "none"): DiskWriteError,
        ("write", "enospc"): DiskFullError,
        ("extend", "eio"): DiskWriteError,
        ("extend", "enospc"): DiskFullError,
    }
    if kind in ("flip", "stale", "swap", "torn", "lost"):
        assert all(caught is None or type(caught) is CorruptionError for caught in outcomes)
        assert sum(type(caught) is CorruptionError for caught in outcomes) >= count // 2
    elif kind == "short":
        # Half of two blocks is one, and goes on; half of one block is no progress.
        assert all(caught is None or type(caught) in (DiskReadError, DiskWriteError) for caught in outcomes)
        assert forever or None in outcomes
    elif kind == "eintr":
        assert outcomes == [None] * count
    else:
        assert all(type(caught) is expected[operation, kind] for caught in outcomes)


def test_no_descriptor_is_left_by_failures(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("descriptors are counted in /proc")
    before = len(os.listdir("/proc/self/fd"))
    for fault in (Fault("read", 2, "eio"), Fault("write", 2, "flip"), Fault("extend", 2, "enospc")):
        _, caught = run(DirectFile(tmp_path), [fault])
        assert caught is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_errors_name_the_place_the_bytes_and_the_reason(tmp_path: Path) -> None:
    inner = MemoryFile(name=str(tmp_path))
    file = FaultyFile(
        inner, [Fault("write", 3, "eio"), Fault("read", 2, "none"), Fault("write", 5, "enospc")]
    )
    with DiskTier([file], ledger=Ledger(), budget=64 * BLOCK, threads=1, request_bytes=2 * BLOCK) as tier:
        tier.allocate(BLOCK)
        extent = tier.allocate(4 * BLOCK)
        data = memoryview(bytes(4 * BLOCK))
        write_now(tier, extent, data)
        with pytest.raises(DiskWriteError) as write:
            write_now(tier, extent, data)
        assert write.value.errno == errno.EIO
        for part in (
            "write of 8,192 bytes",
            "offset 4,096",
            str(tmp_path),
            "Input/output error",
            "after 0 bytes",
        ):
            assert part in str(write.value)
        with pytest.raises(StateError, match="last write failed"):
            tier.read(extent, memoryview(bytearray(4 * BLOCK)))
        write_now(tier, tier.allocate(BLOCK), memoryview(bytes(BLOCK)))
        with pytest.raises(DiskFullError, match="free space there") as full:
            write_now(tier, extent, data)
        assert full.value.errno == errno.ENOSPC
        write_now(tier, extent, data)
        with pytest.raises(
            DiskReadError, match=r"read of 8,192 bytes at offset 12,288 .* stopped short after 0"
        ):
            read_now(tier, extent, memoryview(bytearray(4 * BLOCK)))
        read_now(tier, extent, memoryview(bytearray(4 * BLOCK)))  # nothing is lost by a failed read


def test_a_transfer_goes_on_after_a_short_one_at_an_aligned_place() -> None:
    class Ragged(MemoryFile):
        def pread(self, view: memoryview, offset: int) -> int:
            assert offset % BLOCK == len(view) % BLOCK == 0
            return (
                super().pread(view, offset)
                if len(view) <= BLOCK
                else super().pread(view[: BLOCK + 700], offset)
            )

    with DiskTier([Ragged()], ledger=Ledger(), budget=64 * BLOCK) as tier:
        extent = tier.allocate(5 * BLOCK)
        data = bytearray(pattern(1, 5 * BLOCK)[: 5 * BLOCK])
        write_now(tier, extent, memoryview(data))
        back = bytearray(5 * BLOCK)
        read_now(tier, extent, memoryview(back))
        assert back == data


def test_an_error_that_is_not_the_systems_still_ends_the_transfer() -> None:
    class Broken(MemoryFile):
        def pread(self, view: memoryview, offset: int) -> int:
            raise ZeroDivisionError

    with DiskTier([Broken()], ledger=Ledger(), budget=MIB) as tier:
        extent = tier.allocate(BLOCK)
        write_now(tier, extent, memoryview(bytes(BLOCK)))
        with pytest.raises(ZeroDivisionError):
            read_now(tier, extent, memoryview(bytearray(BLOCK)))


# -- contents -------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> tuple[DirectFile, DiskTier]:
    file = DirectFile(tmp_path)
    return file, DiskTier([file], ledger=Ledger(), budget=MIB, request_bytes=2 * BLOCK)


def test_flipped_stale_and_swapped_blocks_are_found(pair: tuple[DirectFile, DiskTier]) -> None:
    file, tier = pair
    with tier:
        first, second = tier.allocate(4 * BLOCK), tier.allocate(4 * BLOCK)
        old, new = reserve(4 * BLOCK), reserve(4 * BLOCK)
        old.tensor.random_(0, 256)
        new.tensor.random_(0, 256)
        back = reserve(4 * BLOCK)
        write_now(tier, first, old.buffer)
        write_now(tier, first, new.buffer)
        write_now(tier, second, old.buffer)

        def spoil(what: memoryview, offset: int) -> None:
            file.pwrite(what, first.offset + offset)
            with pytest.raises(CorruptionError, match=f"offset {first.offset + 2 * BLOCK:,}"):
                read_now(tier, first, back.buffer)
            write_now(tier, first, new.buffer)
            read_now(tier, first, back.buffer)
            assert back.buffer == new.buffer

        flipped = reserve(BLOCK)
        flipped.buffer[:] = new.buffer[3 * BLOCK :]
        flipped.buffer[BLOCK - 1] ^= 128
        spoil(flipped.buffer, 3 * BLOCK)
        spoil(old.buffer[2 * BLOCK :], 2 * BLOCK)  # what was there a generation ago, and is in `second` now
        swapped = reserve(2 * BLOCK)
        swapped.buffer[:BLOCK], swapped.buffer[BLOCK:] = (
            new.buffer[3 * BLOCK :],
            new.buffer[2 * BLOCK : 3 * BLOCK],
        )
        spoil(swapped.buffer, 2 * BLOCK)
        read_now(tier, second, back.buffer)
        assert back.buffer == old.buffer


def test_without_checksums_only_the_system_finds_faults() -> None:
    file = FaultyFile(MemoryFile(), [Fault("read", 1, "flip")])
    with DiskTier([file], ledger=Ledger(), budget=MIB, checksum=False) as tier:
        extent = tier.allocate(BLOCK)
        write_now(tier, extent, memoryview(bytes(BLOCK)))
        read_now(tier, extent, memoryview(bytearray(BLOCK)))


# -- a full disk ----------------------------------------------------------------------------------


def test_a_full_disk_shows_when_space_is_asked_for(small_disk: Path, tmp_path: Path) -> None:
    with DiskTier([small_disk], ledger=Ledger(), budget=64 * MIB) as tier:
        extent = tier.allocate(4 * MIB)
        with pytest.raises(DiskFullError) as caught:
            tier.allocate(16 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert str(small_disk) in str(caught.value)
        assert tier.used == 4 * MIB
        tier.allocate(2 * MIB)
        write_now(tier, extent, memoryview(bytes(4 * MIB)))
    with DiskTier([small_disk, tmp_path], ledger=Ledger(), budget=64 * MIB) as tier:
        assert {tier.allocate(3 * MIB).lane for _ in range(8)} == {0, 1}  # the other disk takes over
