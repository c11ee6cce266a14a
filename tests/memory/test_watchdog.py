"""A disk that hangs is named, with what waits for it. Time is the test's own: nothing here sleeps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import LRU
from outcore.memory import watchdog
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.host import PAGE, reserve
from outcore.memory.ledger import Ledger


class Gate(MemoryFile):
    """A file whose reads or writes hang while it is shut."""

    def __init__(self) -> None:
        super().__init__(name="/nvme")
        self.shut = ""
        self.opened = threading.Event()

    def pread(self, view: memoryview, offset: int) -> int:
        if self.shut == "read":
            self.opened.wait()
        return super().pread(view, offset)

    def pwrite(self, view: memoryview, offset: int) -> int:
        if self.shut == "write":
            self.opened.wait()
        return super().pwrite(view, offset)


class Turns(watchdog.Clock):
    """Each wait lasts as long as it may, at once, until the gate is opened after some of them."""

    def __init__(self, gate: Gate, turns: int) -> None:
        self.gate = gate
        self.turns = turns
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def wait(self, wait: Callable[[float], bool], seconds: float) -> bool:
        if self.gate.shut and self.turns:
            self.turns -= 1
            self.time += seconds
            return False
        self.gate.opened.set()
        return wait(10)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def hang(gate: Gate, kind: str, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.shut = kind
    monkeypatch.setattr(watchdog, "CLOCK", Turns(gate, turns))


def build(gate: Gate, room: int, queue: int = 1 << 20) -> tuple[Pool, list[Chunk], DiskTier]:
    ledger = Ledger()
    disk = DiskTier([gate], ledger=ledger, budget=1 << 20, queue_bytes=queue, threads=1)
    names = [f"blocks.{k} parameters 1/1" for k in range(4)]
    chunks = [Chunk(Kind.PARAMETER, name, reserve(PAGE)) for name in names]

    class Nothing:
        now = epoch = 0

        def revised(self) -> None:
            """Nothing is known."""

        def next_use(self, chunk: Chunk) -> int:
            return 0

        def excused(self) -> tuple[int, ...]:
            return ()

        def needs(self, distance: int) -> None:
            """Nothing is known."""

    return Pool(ledger, disk, room * PAGE, Nothing(), LRU()), chunks, disk


def texts(said: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in said]


def test_a_read_that_hangs_is_named_each_minute(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, chunks, disk = build(gate, 1)
    with disk:
        for k in (0, 1):
            with pool.guard([chunks[k]], Access.FRESH):
                chunks[k].region.tensor.fill_(k + 1)
        pool.hold_idle(False)
        pool.hold_idle(True)
        hang(gate, "read", 2, monkeypatch)
        with pytest.warns(RuntimeWarning) as said, pool.guard([chunks[0]], Access.READ):
            assert chunks[0].region.tensor.eq(1).all()
        pool.close()
    assert texts(said.list) == [
        f"nothing has moved for {seconds} s: everything waits for the read of 4,096 bytes of blocks.0 parameters 1/1 "
        "at offset 0 of the swap file in /nvme; the disk or its driver hangs, or is very slow"
        for seconds in (60, 120)
    ]


def test_a_write_that_hangs_is_named(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, chunks, disk = build(gate, 1)
    with disk:
        with pool.guard([chunks[0]], Access.FRESH):
            pass
        hang(gate, "write", 1, monkeypatch)
        with pytest.warns(RuntimeWarning) as said, pool.guard([chunks[1]], Access.FRESH):
            pass
        gate.shut = ""
        pool.close()
    [text] = texts(said.list)
    assert (
        "waits for the write of 4,096 bytes of blocks.0 parameters 1/1 at offset 0 of the swap file in /nvme"
        in text
    )


def test_a_queue_that_is_full_names_what_it_waits_for(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    with DiskTier([gate], ledger=ledger, budget=1 << 20, queue_bytes=PAGE, threads=1) as disk:
        extents = [disk.allocate(PAGE, f"chunk {k}") for k in range(2)]
        data = reserve(PAGE)
        hang(gate, "write", 1, monkeypatch)
        first = disk.write(extents[0], data.buffer)
        with pytest.warns(RuntimeWarning, match="the write of 4,096 bytes of chunk 0 at offset 0"):
            second = disk.write(extents[1], data.buffer)
        first.result()
        second.result()


def test_the_oldest_of_several_is_named(gate: Gate) -> None:
    other = Gate()
    with DiskTier([gate, other], ledger=Ledger(), budget=1 << 20, threads=1) as disk:
        assert disk.stalled() == ""
        extents = [disk.allocate(PAGE, f"chunk {k}") for k in range(4)]
        gate.shut = other.shut = "write"
        done = [disk.write(extent, reserve(PAGE).buffer) for extent in extents]
        assert "chunk 0" in disk.stalled()
        gate.opened.set()
        for extent, future in zip(extents, done, strict=True):
            if extent.lane == extents[0].lane:
                future.result()
        assert "chunk 1" in disk.stalled()
        other.opened.set()
        for future in done:
            future.result()
        assert disk.stalled() == ""


def test_a_disk_that_is_fast_enough_is_not_reported(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, chunks, disk = build(gate, 1)
    monkeypatch.setattr(watchdog, "CLOCK", Turns(gate, 5))  # the gate is open: no wait lasts
    with disk:
        for k in range(4):
            with pool.guard([chunks[k]], Access.FRESH):
                pass
        with pool.guard([chunks[0]], Access.READ):
            pass
        pool.close()


def test_in_a_run_the_unit_is_named(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files(places: object) -> list[Gate]:
        return [gate]

    monkeypatch.setattr("outcore.memory.disk.open_files", files)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    budget = outcore.Budget(host="1MiB", disk=f"{tmp_path}:64MiB")
    outcore.offload(model, budget=budget, prefetch=False)
    with torch.no_grad():
        model(torch.zeros(1, 256))
        hang(gate, "read", 1, monkeypatch)
        with pytest.warns(RuntimeWarning, match=r"the read of [\d,]+ bytes of \d parameters 1/1 at offset"):
            model(torch.zeros(1, 256))
    gate.shut = ""
    outcore.release(model)
