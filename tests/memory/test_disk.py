from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waited import read_now, write_now

from outcore.errors import DiskFullError, StateError, UsageError
from outcore.memory.blockfile import BLOCK, DirectFile, MemoryFile
from outcore.memory.disk import DiskTier, Extent
from outcore.memory.host import PAGE, Region, reserve
from outcore.memory.lane import Lane
from outcore.memory.ledger import Ledger
from outcore.memory.limits import DiskLimit

MiB = 1 << 20


def random_region(nbytes: int) -> Region:
    region = reserve(nbytes)
    region.tensor.random_(0, 256)
    return region


@pytest.fixture(params=["disk", "memory"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskTier]:
    file = DirectFile(tmp_path) if request.param == "disk" else MemoryFile()
    with DiskTier([file], ledger=Ledger(), budget=64 * MiB, request_bytes=4 * BLOCK) as tier:
        yield tier
    assert list(tmp_path.iterdir()) == []


def test_bytes_come_back_where_they_were(tier: DiskTier) -> None:
    regions = [random_region(n * PAGE) for n in (1, 3, 4, 5, 40)]
    copies = [region.tensor.clone() for region in regions]
    extents = [tier.allocate(region.nbytes) for region in regions]
    for writing in [tier.write(e, r.buffer) for e, r in zip(extents, regions, strict=True)]:
        writing.result()
    for region in regions:
        region.release()
    for reading in [tier.read(e, r.buffer) for e, r in zip(extents, regions, strict=True)]:
        reading.result()
    assert all(torch.equal(r.tensor, copy) for r, copy in zip(regions, copies, strict=True))
    assert not tier.stalled()


def test_past_the_page_cache_or_not(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    if not file.direct:
        pytest.skip("this file system refuses O_DIRECT")
    with DiskTier([file], ledger=Ledger(), budget=64 * MiB) as tier:
        region = random_region(8 * MiB)
        extent = tier.allocate(region.nbytes)
        write_now(tier, extent, region.buffer)
        # Unaligned memory would be refused by the system were it not copied.
        back = memoryview(bytearray(8 * MiB + 1))[1:]
        read_now(tier, extent, back)
        assert back == region.buffer


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9 * BLOCK), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_any_length_at_any_address(nbytes: int, out_at: int, back_at: int, page: bool) -> None:
    with DiskTier([gettempdir()], ledger=Ledger(), budget=MiB, threads=2, request_bytes=2 * BLOCK) as tier:
        before, extent, behind = tier.allocate(1), tier.allocate(nbytes), tier.allocate(1)
        for neighbour in (before, behind):
            write_now(tier, neighbour, memoryview(b"n"))
        data = os.urandom(nbytes)
        out = (reserve(nbytes).buffer if page else memoryview(bytearray(nbytes + out_at))[out_at:])[:nbytes]
        back = (reserve(nbytes).buffer if page else memoryview(bytearray(nbytes + back_at))[back_at:])[
            :nbytes
        ]
        out[:] = data
        write_now(tier, extent, out.toreadonly())
        read_now(tier, extent, back)
        assert back == data
        for neighbour in (before, behind):
            letter = bytearray(1)
            read_now(tier, neighbour, memoryview(letter))
            assert letter == b"n"


def test_typed_views_are_taken_as_bytes(tier: DiskTier) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    back = torch.zeros(10, 100)
    extent = tier.allocate(4000)
    write_now(tier, extent, memoryview(values.numpy()))
    read_now(tier, extent, memoryview(back.numpy()))
    assert torch.equal(back.flatten(), values)


def test_freed_space_is_used_again(tier: DiskTier) -> None:
    extents = [tier.allocate(3 * BLOCK) for _ in range(5)]
    offsets = {e.offset for e in extents}
    for extent in extents:
        tier.free(extent)
    assert tier.used == 0
    assert {tier.allocate(3 * BLOCK - 5).offset for _ in range(5)} == offsets


def test_a_freed_extent_brings_no_old_bytes_along(tier: DiskTier) -> None:
    extent = tier.allocate(BLOCK)
    write_now(tier, extent, memoryview(bytes(BLOCK)))
    tier.free(extent)
    again = tier.allocate(BLOCK)
    assert again.offset == extent.offset
    with pytest.raises(StateError, match="holds nothing"):
        tier.read(again, memoryview(bytearray(BLOCK)))


def test_calls_without_meaning(tier: DiskTier) -> None:
    extent = tier.allocate(BLOCK)
    write_now(tier, extent, memoryview(bytes(BLOCK)))
    for wrong in (bytes(BLOCK - 1), bytes(BLOCK + 1)):
        with pytest.raises(UsageError):
            tier.write(extent, memoryview(wrong))
    with pytest.raises(UsageError, match="read-only"):
        tier.read(extent, memoryview(bytes(BLOCK)))
    with pytest.raises(UsageError, match="contiguous"):
        tier.read(extent, memoryview(bytearray(2 * BLOCK))[::2])
    for nothing in (0, -1):
        with pytest.raises(UsageError):
            tier.allocate(nothing)
    tier.free(extent)
    with pytest.raises(StateError, match="freed"):
        tier.free(extent)
    with pytest.raises(StateError, match="freed"):
        tier.write(extent, memoryview(bytes(BLOCK)))
    assert not tier.stalled()


@pytest.mark.parametrize(
    "settings",
    [{"files": []}, {"budget": 0}, {"budget": [1, 2]}, {"threads": 0}, {"request_bytes": 5000}],
    ids=str,
)
def test_tiers_without_meaning(settings: dict[str, object]) -> None:
    given: dict[str, object] = {"files": [MemoryFile()], "budget": MiB, "ledger": Ledger()}
    with pytest.raises(UsageError):
        DiskTier(**{**given, **settings})  # type: ignore[arg-type]


def test_the_budget_is_a_promise(tier: DiskTier) -> None:
    extents = [tier.allocate(16 * MiB) for _ in range(3)]
    tier.free(extents[0])
    tier.allocate(MiB)
    with pytest.raises(DiskFullError, match="17,825,792 bytes are needed") as caught:
        tier.allocate(17 * MiB)
    assert "give the disk at least 1,048,576 bytes more" in str(caught.value)
    assert "32,505,856 are left, 16,777,216 of them in one piece" in str(caught.value)
    assert tier.used == 33 * MiB


def test_the_ledger_knows_every_byte() -> None:
    ledger = Ledger()
    with DiskTier([MemoryFile()], ledger=ledger, budget=MiB) as tier:
        a, b = tier.allocate(5000), tier.allocate(BLOCK)
        assert ledger.held("disk") == 3 * BLOCK
        write_now(tier, a, memoryview(bytes(5000)))
        read_now(tier, a, memoryview(bytearray(5000)))
        read_now(tier, a, memoryview(bytearray(5000)))
        tier.free(b)
        assert ledger.held("disk") == 2 * BLOCK
    assert ledger.held("disk") == 0
    assert ledger.peak("disk") == 3 * BLOCK
    moved = ledger.snapshot().moved
    assert (moved["disk write"], moved["disk read"]) == (5000, 10000)


def test_opening_the_limits_of_a_budget(tmp_path: Path) -> None:
    with DiskTier.open([DiskLimit(str(tmp_path), MiB)] * 2, ledger=Ledger()) as tier:
        assert tier.budget == 2 * MiB


# -- several files --------------------------------------------------------------------------------


def shares(tier: DiskTier, count: int, files: int) -> list[int]:
    lanes = [tier.allocate(BLOCK).lane for _ in range(count)]
    return [lanes.count(k) for k in range(files)]


def test_files_share_alike_until_their_speed_is_known() -> None:
    with DiskTier([MemoryFile() for _ in range(3)], ledger=Ledger(), budget=MiB) as tier:
        assert shares(tier, 30, 3) == [10, 10, 10]


def test_a_slower_file_gets_a_smaller_share(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [MemoryFile(name="slow"), MemoryFile(name="fast")]
    monkeypatch.setattr(Lane, "rate", property(lambda lane: 1e9 if lane.file.name == "slow" else 3e9))
    with DiskTier(files, ledger=Ledger(), budget=MiB) as tier:
        assert shares(tier, 40, 2) == [10, 30]


def test_a_full_file_leaves_the_rest_to_the_others() -> None:
    files = [MemoryFile(), MemoryFile(capacity=3 * BLOCK), MemoryFile()]
    with DiskTier(files, ledger=Ledger(), budget=[2 * BLOCK, MiB, MiB]) as tier:
        assert shares(tier, 30, 3) == [2, 3, 25]


def test_speed_is_measured() -> None:
    with DiskTier([MemoryFile()], ledger=Ledger(), budget=64 * MiB) as tier:
        region, extent = reserve(16 * MiB), tier.allocate(16 * MiB)
        assert tier._lanes[0].rate == 0
        for _ in range(5):
            write_now(tier, extent, region.buffer)
        assert tier._lanes[0].rate > 1e6


class Timed(MemoryFile):
    """Each write takes a second of a clock that nothing else moves; the last one waits until it is let go."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.now, self.last = 0.0, last
        self.reached, self.free = threading.Event(), threading.Event()

    def pwrite(self, view: memoryview, offset: int) -> int:
        if self.now == self.last:
            self.reached.set()
            assert self.free.wait(60)
        self.now += 1.0
        return super().pwrite(view, offset)


def test_the_speed_of_a_file_that_never_rests_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Timed(last=24)
    monkeypatch.setattr("outcore.memory.lane.time", SimpleNamespace(perf_counter=lambda: file.now))
    with DiskTier([file], ledger=Ledger(), budget=256 * MiB, threads=1, request_bytes=4 * MiB) as tier:
        region = reserve(16 * MiB)
        write_now(tier, tier.allocate(16 * MiB), region.buffer)  # then it rests, this once
        futures = [tier.write(tier.allocate(16 * MiB), region.buffer) for _ in range(6)]
        try:
            assert file.reached.wait(60)
            assert tier._lanes[0].rate == 4 * MiB
        finally:
            file.free.set()
        for future in futures:
            future.result()


def test_a_closed_tier_holds_nothing_of_any_kind() -> None:
    ledger = Ledger()
    tier = DiskTier([MemoryFile()], ledger=ledger, budget=MiB)
    tier.allocate(BLOCK, kind="state")
    tier.allocate(BLOCK)
    levels: dict[str, int] = {}
    ledger.observe(SimpleNamespace(level=lambda tier, kind, nbytes: levels.update({kind: nbytes})))  # type: ignore[arg-type]
    assert levels == {"state": BLOCK, "other": BLOCK}
    tier.close()
    assert levels == {"state": 0, "other": 0}
    assert ledger.snapshot().held["disk"] == 0


def test_extents_say_where_they_are() -> None:
    assert repr(Extent(5000, 4096, 1)) == "Extent(nbytes=5000, offset=4096, lane=1)"


SHARES = """
import os, sys
from outcore.memory.disk import DiskTier
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger

value = int(sys.argv[2])
tier = DiskTier([sys.argv[1]], ledger=Ledger(), budget=8 << 20)
extents = [tier.allocate(1 << 20) for _ in range(8)]
print("ready", os.fstat(tier._lanes[0].file._fd).st_ino, flush=True)
for turn in range(3):
    assert sys.stdin.readline()
    for k, extent in enumerate(extents):
        place = reserve(1 << 20)
        place.tensor.fill_(value + turn + k)
        tier.write(extent, place.buffer).result()
    print("written", flush=True)
    assert sys.stdin.readline()
    for k, extent in enumerate(extents):
        place = reserve(1 << 20)
        tier.read(extent, place.buffer).result()
        assert place.tensor.eq(value + turn + k).all()
    print("read", flush=True)
tier.close()
"""


def test_two_runs_in_one_folder_never_meet(tmp_path: Path) -> None:
    """Two processes write the same offsets in turns, and each reads its own bytes; nothing has a name."""
    command = [sys.executable, "-c", SHARES, str(tmp_path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([*command, "1"], **pipes) as one,
        subprocess.Popen([*command, "100"], **pipes) as two,
    ):

        def tell(process: subprocess.Popen[str]) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert one.stdout is not None
        assert two.stdout is not None
        files = {process.stdout.readline() for process in (one, two)}
        assert len(files) == 2
        for _ in range(3):
            assert list(tmp_path.iterdir()) == []
            assert [tell(process) for process in (one, two)] == ["written"] * 2
            assert [tell(process) for process in (two, one)] == ["read"] * 2
    assert one.returncode == two.returncode == 0
