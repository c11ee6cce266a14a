"""How a tier ends, and that nothing is left of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from waited import write_now

from outcore.errors import StateError
from outcore.memory.blockfile import BLOCK, MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger

MiB = 1 << 20


def test_closing_finishes_what_was_begun_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    file = MemoryFile()
    tier = DiskTier([file], ledger=Ledger(), budget=MiB, threads=3, request_bytes=BLOCK)
    extent = tier.allocate(64 * BLOCK)
    writing = tier.write(extent, memoryview(bytes(64 * BLOCK)))
    tier.close()
    tier.close()
    assert writing.done()
    assert writing.exception() is None
    assert file.closed
    assert set(threading.enumerate()) == before
    for call in (
        lambda: tier.allocate(1),
        lambda: tier.write(extent, memoryview(bytes(64 * BLOCK))),
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    tier.free(extent)  # everything has been given back: harmless
    assert not tier.stalled()


def test_a_forgotten_tier_closes_itself() -> None:
    before = set(threading.enumerate())
    file = MemoryFile()
    tier = DiskTier([file], ledger=Ledger(), budget=MiB)
    tier.write(tier.allocate(BLOCK), memoryview(bytes(BLOCK))).result()
    del tier
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert file.closed
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_process_ends_with_transfers_under_way(tmp_path: Path, ending: str) -> None:
    script = (
        "import sys\n"
        "from outcore.memory.disk import DiskTier\nfrom outcore.memory.ledger import Ledger\n"
        "tier = DiskTier([sys.argv[1]], ledger=Ledger(), budget=1 << 26)\n"
        "data = memoryview(bytes(1 << 24))\n"
        "futures = [tier.write(tier.allocate(1 << 24), data) for _ in range(4)]\n" + ending
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == {"": 0, "1 / 0": 1}.get(ending, 3)
    assert ("ZeroDivisionError" in done.stderr) if "/" in ending else done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("descriptors are counted in /proc")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with DiskTier([tmp_path, tmp_path], ledger=Ledger(), budget=MiB) as tier:
            write_now(tier, tier.allocate(BLOCK), memoryview(bytes(BLOCK)))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier([tmp_path], ledger=Ledger(), budget=MiB) as tier:
        yield tier


def test_idle_threads_keep_no_memory_alive(tier: DiskTier) -> None:
    region = reserve(64 * BLOCK)
    mapping = weakref.ref(region._mapping)
    extent = tier.allocate(region.nbytes)
    write_now(tier, extent, region.buffer)
    done = threading.Event()
    reading: Future[None] = tier.read(extent, region.buffer)
    reading.add_done_callback(lambda _: done.set())
    reading.result()
    assert done.wait(10)
    del region, reading
    write_now(tier, tier.allocate(1), memoryview(b"x"))  # a thread has gone round once more
    gc.collect()
    assert mapping() is None
