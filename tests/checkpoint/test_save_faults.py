"""Every file system call of a save and of a load fails in turn: a typed error, or the same result; never a loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from checkpoint.faulty_files import READS, WRITES, FaultyFiles
from checkpoint.runs import DROPOUT, offloaded, seed_all, train, weights
from outcore.checkpoint import files as seam
from outcore.checkpoint import pieces
from outcore.errors import CheckpointError, DiskFullError, DiskReadError, DiskWriteError, UsageError

SHAPE = DROPOUT


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[nn.Module, outcore.Optimizer]]:
    """A run after one step, with small files so that there are several, and a first checkpoint."""
    monkeypatch.setattr(pieces, "FILE_BYTES", 1_500_000)
    seed_all(1)
    with offloaded(SHAPE, chunk_size="1MiB") as (model, optimizer):
        train(model, optimizer, SHAPE, range(1))
        outcore.save(tmp_path / "run" / "first", model, optimizer, extra=1)
        yield model, optimizer


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def state(model: nn.Module, optimizer: outcore.Optimizer) -> dict[str, Any]:
    return {"weights": weights(model), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_error(error: OSError, kind: str, place: Path) -> None:
    """It says where it was, and what."""
    assert kind != "ENOSPC" or isinstance(error, DiskFullError)
    assert str(place) in str(error)


def verify(target: Path) -> None:
    """With a file system that works again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "SYSTEM", seam.Files())
        outcore.verify(target)


@pytest.mark.parametrize(
    ("kind", "forever"),
    [
        ("EIO", False),
        pytest.param("EIO", True, marks=pytest.mark.slow),
        pytest.param("ENOSPC", False, marks=pytest.mark.slow),
        ("ENOSPC", True),
        ("short", False),
        pytest.param("short", True, marks=pytest.mark.slow),
        pytest.param("none", False, marks=pytest.mark.slow),
        ("none", True),
    ],
)
def test_each_operation_of_a_save(
    kind: str,
    forever: bool,
    run: tuple[nn.Module, outcore.Optimizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = run
    before = state(model, optimizer)
    operations = WRITES if kind in ("EIO", "ENOSPC") else ("write",)
    counting = FaultyFiles(operations)
    monkeypatch.setattr(seam, "SYSTEM", counting)
    outcore.save(tmp_path / "run" / "counted", model, optimizer)
    assert counting.count > (30 if operations is WRITES else 15)
    assert not counting.opened
    verify(tmp_path / "run" / "counted")
    whole = sum(1 for _ in (tmp_path / "run").iterdir())
    open_before = descriptors()
    failed = 0
    for at in range(1, counting.count + 1):
        target = tmp_path / "run" / f"{kind}-{at}"
        files = FaultyFiles(operations, at, kind, forever)
        monkeypatch.setattr(seam, "SYSTEM", files)
        try:
            outcore.save(target, model, optimizer)
        except (DiskFullError, DiskWriteError) as error:
            failed += 1
            check_error(error, kind, tmp_path)
            if target.exists():  # committed, but neither made durable nor undone: whole nevertheless
                assert forever
                failed -= 1
                verify(target)
        else:
            assert kind == "short" or files.log[at - 1] in ("names", "close"), files.log[at - 1]
            verify(target)
        assert not files.opened
        assert descriptors() == open_before
    if kind != "short":
        assert failed >= counting.count - 2
    monkeypatch.setattr(seam, "SYSTEM", seam.Files())
    assert same(state(model, optimizer), before)
    assert not list((tmp_path / "run").glob(".tmp-*"))
    assert sum(1 for _ in (tmp_path / "run").iterdir()) == whole + counting.count - failed
    # training goes on, the first checkpoint still loads, and the next save does what the failed ones did not
    train(model, optimizer, SHAPE, range(1))
    outcore.save(tmp_path / "run" / "after", model, optimizer)
    assert outcore.load(tmp_path / "run" / "first", model, optimizer) == 1
    assert same(state(model, optimizer), before)


@pytest.mark.parametrize(
    ("kind", "forever"),
    [
        pytest.param("EIO", False, marks=pytest.mark.slow),
        ("EIO", True),
        ("short", False),
        pytest.param("short", True, marks=pytest.mark.slow),
        pytest.param("none", False, marks=pytest.mark.slow),
        ("none", True),
    ],
)
def test_each_operation_of_a_load(
    kind: str,
    forever: bool,
    run: tuple[nn.Module, outcore.Optimizer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = run
    expected = state(model, optimizer)
    operations = READS if kind == "EIO" else ("read",)
    counting = FaultyFiles(operations)
    monkeypatch.setattr(seam, "SYSTEM", counting)
    outcore.load(tmp_path / "run" / "first", model, optimizer)
    open_before = descriptors()
    undefined = 0
    for at in range(1, counting.count + 1):
        files = FaultyFiles(operations, at, kind, forever)
        monkeypatch.setattr(seam, "SYSTEM", files)
        changed = False
        try:
            outcore.load(tmp_path / "run" / "first", model, optimizer)
        except (CheckpointError, DiskReadError) as error:
            changed = "undefined" in str(error)
            undefined += changed
        monkeypatch.setattr(seam, "SYSTEM", seam.Files())
        assert not files.opened
        assert descriptors() == open_before
        if changed:
            outcore.load(tmp_path / "run" / "first", model, optimizer)
        if at % 9 == 0 or not changed:
            assert same(state(model, optimizer), expected)
    assert (undefined > 0) == (kind != "short")


def test_refusals(run: tuple[nn.Module, outcore.Optimizer], tmp_path: Path) -> None:
    model, optimizer = run
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "dangling", "empty", "run/first"):
        with pytest.raises(UsageError, match="exists already"):
            outcore.save(tmp_path / name, model, optimizer)
    for name in ("/", "a/..", ".tmp-a"):
        with pytest.raises(UsageError):
            outcore.save(tmp_path / name, model, optimizer)
    with pytest.raises(DiskWriteError):
        outcore.save(tmp_path / "file" / "below", model, optimizer)
    with pytest.raises(DiskWriteError):
        outcore.save(tmp_path / ("n" * 300), model, optimizer)
    with pytest.raises(UsageError, match=r"extra\['a'\]\[1\] is a object"):
        outcore.save(tmp_path / "x", model, optimizer, extra={"a": [1, object()]})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested"):
        outcore.save(tmp_path / "x", model, optimizer, extra=loop)
    with pytest.raises(UsageError, match="not the one"):
        outcore.save(tmp_path / "x", model, outcore.AdamW([torch.nn.Parameter(torch.ones(2))]))
    SHAPE.loss(model(**SHAPE.batch(1))).backward()
    with pytest.raises(outcore.errors.StateError, match="between steps"):
        outcore.save(tmp_path / "x", model, optimizer)
    optimizer.zero_grad()
    assert not (tmp_path / "x").exists()
    with outcore.gather(model), pytest.raises(outcore.errors.StateError, match="open"):
        outcore.load(tmp_path / "run" / "first", model, optimizer)


def test_the_umask_counts(run: tuple[nn.Module, outcore.Optimizer], tmp_path: Path) -> None:
    model, optimizer = run
    for mask in (0o022, 0o077):
        old = os.umask(mask)
        try:
            outcore.save(tmp_path / f"{mask}", model, optimizer)
        finally:
            os.umask(old)
        assert (tmp_path / f"{mask}").stat().st_mode & 0o777 == 0o777 & ~mask
        for file in (tmp_path / f"{mask}").iterdir():
            assert file.stat().st_mode & 0o777 == 0o666 & ~mask
