from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_disk import small_disk

from outcore.memory import blockfile
from outcore.memory.blockfile import BLOCK, BlockFile, DirectFile, MemoryFile, open_files
from outcore.memory.host import reserve

__all__ = ["small_disk"]


@pytest.fixture(params=["direct", "buffered", "unlinked", "memory"])
def file(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BlockFile]:
    if request.param == "buffered":
        monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    if request.param == "unlinked":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    made: BlockFile = MemoryFile() if request.param == "memory" else DirectFile(tmp_path)
    if isinstance(made, DirectFile) and request.param == "buffered":
        assert not made.direct
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_bytes_come_back(file: BlockFile) -> None:
    out, back = reserve(4 * BLOCK), reserve(4 * BLOCK)
    out.tensor.random_(0, 256)
    file.extend(16 * BLOCK)
    assert file.pwrite(out.buffer, 3 * BLOCK) == 4 * BLOCK
    assert file.pread(back.buffer, 3 * BLOCK) == 4 * BLOCK
    assert back.buffer == out.buffer


def test_the_end_of_the_file(file: BlockFile) -> None:
    back = reserve(4 * BLOCK)
    assert file.pread(back.buffer, 0) == 0
    file.extend(2 * BLOCK)
    file.extend(BLOCK)  # never shorter
    assert file.pread(back.buffer, 0) == 2 * BLOCK
    assert not back.tensor.any()


def test_space_is_really_taken(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    file.extend(256 * BLOCK)
    taken = os.fstat(file._fd).st_blocks * 512
    if taken < 256 * BLOCK:
        pytest.skip("this file system can't allocate ahead")
    file.close()


def test_nobody_else_can_open_it(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    found = os.fstat(file._fd)
    assert found.st_nlink == 0
    assert found.st_mode & 0o777 == 0o600
    assert not os.get_inheritable(file._fd)
    with pytest.raises(OSError, match=r"."):
        os.link(f"/proc/self/fd/{file._fd}", tmp_path / "name", follow_symlinks=True)
    file.close()
    file.close()


@pytest.mark.parametrize("anonymous", [True, False])
def test_nothing_is_left_after_a_kill(tmp_path: Path, anonymous: bool) -> None:
    script = (
        "import os, sys, time\n"
        + ("" if anonymous else "del os.O_TMPFILE\n")
        + "from outcore.memory.blockfile import DirectFile\n"
        "file = DirectFile(sys.argv[1]); file.extend(1 << 20)\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_refuses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectFile(tmp_path / "none")


def test_errors_other_than_a_refusal_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: str, extra: int) -> int:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(blockfile, "_open_anonymous", refuse)
    with pytest.raises(OSError, match="too many"):
        DirectFile(tmp_path)


def test_file_systems_that_cant_allocate_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    file = DirectFile(tmp_path)
    file.extend(10 * BLOCK)
    assert os.fstat(file._fd).st_size == 10 * BLOCK
    file.close()


def test_a_full_disk_shows_when_the_file_grows(small_disk: Path) -> None:
    file = DirectFile(small_disk)
    file.extend(1 << 20)
    with pytest.raises(OSError, match="space") as caught:
        file.extend(64 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert os.fstat(file._fd).st_size == 1 << 20
    file.extend(2 << 20)
    file.close()


def test_a_memory_file_fills_up_too() -> None:
    with pytest.raises(OSError, match="space"):
        MemoryFile(capacity=BLOCK).extend(BLOCK + 1)


def test_all_files_are_opened_or_none(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    memory = MemoryFile()
    with pytest.raises(FileNotFoundError):
        open_files([tmp_path, memory, tmp_path / "none"])
    assert memory.closed
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
