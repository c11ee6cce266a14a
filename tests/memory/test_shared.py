from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from outcore.memory.host import PAGE
from outcore.memory.shared import Commons, SharedMemory, share_of

FRAMES = (3 * PAGE, PAGE)


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory.create(Commons.size(FRAMES, 2))


@pytest.fixture
def both(memory: SharedMemory) -> tuple[Commons, Commons]:
    """As two processes see it."""
    other = SharedMemory.open(memory.address)
    return Commons(memory, FRAMES, 0, 2), Commons(other, FRAMES, 1, 2)


def held(memory: SharedMemory) -> int:
    """Bytes with pages, as the system says, whoever has touched them."""
    number = int.from_bytes(memory.address[8:16], "little")
    return os.fstat(number).st_blocks * 512


def test_what_one_writes_the_other_reads(both: tuple[Commons, Commons]) -> None:
    mine, theirs = (commons.place(0, PAGE, PAGE, 1) for commons in both)
    mine.tensor.fill_(7)
    assert bool((theirs.tensor == 7).all())
    assert bytes(theirs.buffer) == bytes(mine.buffer) == b"\7" * PAGE


def test_pages_go_with_the_last_who_holds_them(memory: SharedMemory, both: tuple[Commons, Commons]) -> None:
    here, there = both
    here.enter(0)
    there.enter(0)
    empty = held(memory)
    place = here.place(0, 0, 3 * PAGE, 1)
    place.tensor.fill_(7)
    assert held(memory) == empty + 3 * PAGE
    here.leave(0)
    assert bool((place.tensor == 7).all())
    here.enter(0)
    there.leave(0)
    assert held(memory) == empty + 3 * PAGE
    here.leave(0)
    assert held(memory) == empty
    assert not place.tensor.any()


def test_frames_do_not_overlap(both: tuple[Commons, Commons]) -> None:
    here, there = both
    for commons in both:
        commons.enter(0)
    first, second = here.place(0, 0, 3 * PAGE, 1), there.place(1, 0, PAGE, 1)
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    assert bool((first.tensor == 1).all())
    here.leave(0)
    there.leave(0)
    assert not first.tensor.any()
    assert bool((second.tensor == 2).all())


def test_who_answers_for_its_bytes(both: tuple[Commons, Commons]) -> None:
    assert [both[0].place(0, 0, 3 * PAGE, parts).nbytes for parts in (1, 2, 3)] == [
        3 * PAGE,
        2 * PAGE,
        PAGE,
    ]
    assert share_of(0, 2) == 0


def test_other_memory_is_not_taken_for_it(memory: SharedMemory) -> None:
    address = memory.address
    with pytest.raises(OSError, match="not the memory"):
        SharedMemory.open(address[:-1] + bytes([address[-1] ^ 1]))
    with pytest.raises(OSError, match="No such file"):
        SharedMemory.open(address[:8] + (1 << 20).to_bytes(8, "little") + address[16:])


def test_it_has_no_name_and_ends_with_its_last_mapping(memory: SharedMemory) -> None:
    number = int.from_bytes(memory.address[8:16], "little")
    assert os.readlink(f"/proc/self/fd/{number}") == "/memfd:outcore (deleted)"
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:outcore" in line]
    assert maps
    assert all(line.split()[1] == "rw-s" for line in maps)


def test_a_refused_mapping_closes_its_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may have been given the number in between."""
    closed: list[int] = []
    close = os.close

    def noted(fd: int) -> None:
        closed.append(fd)
        close(fd)

    def refused(fd: int, nbytes: int) -> None:
        raise OSError("planned")

    monkeypatch.setattr("outcore.memory.shared.os.close", noted)
    monkeypatch.setattr("outcore.memory.shared.mmap.mmap", refused)
    with pytest.raises(OSError, match="planned"):
        SharedMemory.create(PAGE)
    gc.collect()
    assert len(closed) == len(set(closed)) > 0
