"""A checkpoint has more files than a process may have open: few are open at a time, whatever is done with it."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import outcore
from checkpoint.runs import STACK, offloaded, train, weights
from outcore.checkpoint import descriptors, pieces
from outcore.checkpoint import files as seam
from outcore.checkpoint.descriptors import Readable, Writable
from outcore.checkpoint.files import Files
from outcore.cli.main import app
from outcore.errors import DiskWriteError

FEW = 4


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor has a file of its own, and very few are to be open."""
    monkeypatch.setattr(pieces, "FILE_BYTES", 1)
    monkeypatch.setattr(descriptors, "MOST", FEW)


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """This process may have no more than so many open beside those that it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_all_that_is_done_with_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = outcore.Checkpoints(tmp_path / "run")
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        with few_descriptors(24):
            checkpoints.save(1, model, optimizer, extra=1, wait=True)
            assert len(os.listdir(checkpoints.path(1))) > 40
            expected = weights(model)
            checkpoints.save(2, model, optimizer, extra=2)
            train(model, optimizer, STACK, range(1, 3))
            assert checkpoints.latest() == checkpoints.path(2)
            outcore.verify(checkpoints.path(2))
            assert outcore.load(checkpoints.path(1), model, optimizer) == 1
            train(model, optimizer, STACK, range(1))
            assert checkpoints.restore(model, optimizer) == (2, 2)
            assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())
            outcore.to_dcp(checkpoints.path(1), tmp_path / "dcp")
            outcore.from_dcp(tmp_path / "dcp", model, optimizer)
            assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())
            for argument in (checkpoints.path(1), tmp_path / "run"):
                shown = CliRunner().invoke(app, ["inspect", str(argument), "--verify"])
                assert shown.exit_code == 0, shown.output


@dataclass
class Counting(Files):
    """Counts what is open, and what was done how often with each file."""

    names_of: dict[int, str] = field(default_factory=dict)
    most: int = 0
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def _opened(self, fd: int, operation: str, path: Path) -> int:
        self.names_of[fd] = path.name
        self.most = max(self.most, len(self.names_of))
        self.calls[operation, path.name] += 1
        return fd

    def create(self, path: Path) -> int:
        return self._opened(super().create(path), "create", path)

    def open(self, path: Path) -> int:
        return self._opened(super().open(path), "open", path)

    def open_to_write(self, path: Path) -> int:
        return self._opened(super().open_to_write(path), "open_to_write", path)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if offset == 0:
            self.calls["header", self.names_of[fd]] += 1
        return super().read(fd, view, offset)

    def sync(self, fd: int) -> None:
        if fd in self.names_of:
            self.calls["sync", self.names_of[fd]] += 1
        super().sync(fd)

    def close(self, fd: int) -> None:
        self.names_of.pop(fd, None)
        super().close(fd)


def of(files: Counting, operation: str) -> set[int]:
    """How often it was done with each file that it was done with."""
    return {count for (done, _), count in files.calls.items() if done == operation}


def test_nothing_is_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        saved = Counting()
        monkeypatch.setattr(seam, "SYSTEM", saved)
        outcore.save(tmp_path / "saved", model, optimizer)
        assert of(saved, "create") == of(saved, "sync") == {1}
        assert len(saved.names_of) == 0
        assert saved.most <= FEW + 1  # and the manifest
        read = Counting()
        monkeypatch.setattr(seam, "SYSTEM", read)
        outcore.load(tmp_path / "saved", model, optimizer)
        assert of(read, "header") == {1}
        assert max(of(read, "open")) == 2  # to check it, and for its bytes
        assert len(read.names_of) == 0
        assert read.most <= FEW


def test_threads_share_them(tmp_path: Path) -> None:
    """Each writes and reads all files, in an order of its own: no byte goes astray."""
    files, names = Counting(), [tmp_path / str(number) for number in range(9)]
    written, read = Writable(files), Readable(files)
    for path in names:
        written.create(path, memoryview(path.name.encode()))
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for path in itertools.chain.from_iterable(itertools.repeat(names[number:] + names[:number], 60)):
                own = f"{path.name}{number}".encode()
                written.write(path, memoryview(own), 1 + 2 * number)
                found = bytearray(2)
                read.read(path, memoryview(found), 1 + 2 * number)
                assert found == own
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert files.most <= 2 * (FEW + len(threads))
    for path in names:
        written.finish(path)
    written.close()
    read.close()
    assert not files.names_of
    assert {path.name: path.read_text() for path in names} == {
        path.name: path.name + "".join(f"{path.name}{number}" for number in range(6)) for path in names
    }


def test_what_is_in_use_stays_open_and_what_cannot_be_closed_is_said(tmp_path: Path) -> None:
    class Grudging(Files):
        def close(self, fd: int) -> None:
            super().close(fd)
            raise OSError(5, "Input/output error")

    files, names = Grudging(), [tmp_path / str(number) for number in range(FEW + 2)]
    written = Writable(files)
    for path in names[:FEW]:
        written.create(path, memoryview(b"x"))
    with pytest.raises(DiskWriteError, match="can't be written"):
        written.create(names[FEW], memoryview(b"x"))
    kept = descriptors.Descriptors(files.open, lambda fd, path: files.close(fd))
    with kept.use(names[0]) as first, kept.use(names[1]), kept.use(names[2]), kept.use(names[3]):
        written.create(names[FEW], memoryview(b"x"))  # the one that failed is closed all the same
        with kept.use(names[FEW]) as more:  # none can go
            assert len({first, more}) == 2
            os.fstat(first)
    kept.abandon(os.close)
    written.close()
