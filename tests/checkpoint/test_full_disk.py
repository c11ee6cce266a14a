"""A disk that is really full, at each write in turn: small file systems, one page larger than what came before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outcore
from checkpoint.runs import STACK, TIGHT, offloaded, seed_all, train, weights
from checkpoint.test_save_beside_faults import one_step, undisturbed
from exact.reference import Result
from outcore.checkpoint import files as seam
from outcore.checkpoint import pieces
from outcore.checkpoint.files import Files
from outcore.errors import DiskFullError, OutcoreError
from outcore.memory.blockfile import DirectFile

PAGE = 4096


class Filling(Files):
    """Notes how many pages all files took before each write that took one more, and which write was refused."""

    def __init__(self) -> None:
        self.before: list[int] = []
        self.refused = 0
        self._pages: dict[int, set[int]] = {}
        self._closed = 0

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        pages = self._pages.setdefault(fd, set())
        taken = self._closed + sum(map(len, self._pages.values()))
        touched = set(range(offset // PAGE, (offset + len(view) - 1) // PAGE + 1))
        if touched - pages:
            self.before.append(taken)
            pages |= touched
        try:
            return super().write(fd, view, offset)
        except OSError:
            self.refused += 1
            raise

    def close(self, fd: int) -> None:
        self._closed += len(self._pages.pop(fd, ()))
        super().close(fd)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory that `resize` makes as large as asked."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes the superuser, on Linux")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "small", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can't be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def resize(place: Path, pages: int) -> None:
    size = f"remount,size={max(1, pages) * PAGE}"  # 0 would be no limit
    subprocess.run(["mount", "-o", size, str(place)], check=True)


def rooms(place: Path, model: Any, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes in pages at which one write after the other finds the disk full."""
    filling = Filling()
    with monkeypatch.context() as patch:
        patch.setattr(seam, "SYSTEM", filling)
        outcore.save(place / "whole", model, optimizer)
    outcore.verify(place / "whole")
    seam.SYSTEM.remove(place / "whole")
    return [pages for pages in filling.before if pages]


def test_every_write_of_a_save(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "FILE_BYTES", 900_000)
    with offloaded(STACK, **TIGHT.settings(tmp_path)) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        sizes = rooms(small, model, optimizer, monkeypatch)
        assert len(sizes) > 40
        refused = 0
        for pages in sizes:
            resize(small, pages)
            filling = Filling()
            with monkeypatch.context() as patch:
                patch.setattr(seam, "SYSTEM", filling)
                with pytest.raises(DiskFullError, match="small"):
                    outcore.save(small / "checkpoint", model, optimizer)
            assert os.listdir(small) == []
            refused += filling.refused
        assert refused >= len(sizes)  # a write may be cut short before it is refused
        resize(small, 1 << 14)
        outcore.save(small / "checkpoint", model, optimizer)
        outcore.verify(small / "checkpoint")


def test_every_write_of_a_save_beside_training(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, while training goes on: it is told once, and is not harmed."""
    monkeypatch.setattr(pieces, "FILE_BYTES", 900_000)
    settings = TIGHT.settings(tmp_path)
    seed_all(2)
    result = Result()
    with offloaded(STACK, **settings) as (model, optimizer):
        assert not one_step(model, optimizer, 0, result)
        sizes = rooms(small, model, optimizer, monkeypatch)[::4]
        for step, pages in enumerate(sizes, start=1):
            resize(small, pages)
            told: list[OutcoreError] = []
            saving = None
            try:
                saving = outcore.save(small / "checkpoint", model, optimizer, wait=False)
            except DiskFullError as error:  # before it returned
                told.append(error)
            told += one_step(model, optimizer, step, result)
            if saving is not None:
                with pytest.raises(DiskFullError) as caught:
                    saving.wait()
                told = [caught.value, *(other for other in told if other is not caught.value)]
            assert len(told) == 1
            assert os.listdir(small) == []
        result.weights = weights(model)
    result.assert_equal(undisturbed(len(sizes) + 1, **settings))


def test_every_growth_of_the_swap_file(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is told, keeps nothing open, and goes back to its checkpoint once there is room."""
    lengths: list[int] = []
    extend = DirectFile.extend

    def noted(self: DirectFile, nbytes: int) -> None:
        lengths.append(nbytes)
        extend(self, nbytes)

    monkeypatch.setattr(DirectFile, "extend", noted)
    # Others fill the disk after the run has looked what is free there.
    monkeypatch.setattr("outcore.memory.limits.available_disk", lambda path: 64 << 20)
    settings = TIGHT.settings(small)
    seed_all(2)
    with offloaded(STACK, **settings) as (model, optimizer):
        outcore.save(tmp_path / "begun", model, optimizer)
        expected = train(model, optimizer, STACK, range(2))
        expected.weights = weights(model)
    grown = list(lengths)
    assert len(grown) > 8
    refused = 0
    for length in grown[::4]:
        resize(small, length // PAGE - 1)
        try:
            with offloaded(STACK, **settings) as (model, optimizer):
                try:
                    train(model, optimizer, STACK, range(2))
                except DiskFullError:
                    refused += 1
                    optimizer.zero_grad()
                    resize(small, 1 << 14)
                    outcore.load(tmp_path / "begun", model, optimizer)
                    found = train(model, optimizer, STACK, range(2))
                    found.weights = weights(model)
                    found.assert_equal(expected)
        except DiskFullError:  # before the first step
            refused += 1
        assert os.listdir(small) == []
    assert refused == len(grown[::4])
