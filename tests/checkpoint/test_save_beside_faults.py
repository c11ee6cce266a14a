"""A save beside training that fails: a typed error where the run comes by, and training as if nothing had been."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import faulty
import outcore
from checkpoint.faulty_files import WRITES, FaultyFiles
from checkpoint.runs import STACK, TIGHT, offloaded, seed_all, train, weights
from exact.reference import Result
from faulty import Fault
from outcore.checkpoint import files as seam
from outcore.checkpoint import pieces
from outcore.checkpoint.saving import Saving
from outcore.errors import CheckpointError, DiskFullError, DiskWriteError, OutcoreError

SHAPE = STACK


def one_step(model: nn.Module, optimizer: outcore.Optimizer, step: int, result: Result) -> list[OutcoreError]:
    """A step that is told of errors and goes on: what was raised."""
    told: list[OutcoreError] = []
    loss = SHAPE.loss(model(**SHAPE.batch(step)))
    optimizer.backward(loss)
    result.losses.append(loss.item())
    try:
        norm = optimizer.clip_grad_norm_(1.0)
    except OutcoreError as error:
        told.append(error)
        norm = optimizer.clip_grad_norm_(1.0)
    result.norms.append(norm.item())
    try:
        optimizer.step()
    except OutcoreError as error:
        told.append(error)
        optimizer.step()
    optimizer.zero_grad()
    return told


def undisturbed(steps: int, **settings: Any) -> Result:
    result = Result()
    seed_all(2)
    with offloaded(SHAPE, **settings) as (model, optimizer):
        for step in range(steps):
            assert not one_step(model, optimizer, step, result)
        result.weights = weights(model)
    return result


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("kind", "forever", "absent"),
    [
        pytest.param("EIO", False, False, marks=pytest.mark.slow),
        pytest.param("EIO", True, True, marks=pytest.mark.slow),
        pytest.param("ENOSPC", False, True, marks=pytest.mark.slow),
        ("ENOSPC", True, False),
        pytest.param("short", False, False, marks=pytest.mark.slow),
        ("short", True, True),
    ],
)
def test_each_operation(
    kind: str, forever: bool, absent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each in a save of its own; ``updates``: training comes by every chunk first."""
    monkeypatch.setattr(pieces, "FILE_BYTES", 900_000)
    if absent:
        monkeypatch.setattr(Saving, "_write_beside", lambda *_: time.sleep(0.005))
    operations = WRITES if kind != "short" else ("write",)
    result, place = Result(), tmp_path / "run"
    seed_all(2)
    failed = 0
    with offloaded(SHAPE, chunk_size="256KiB") as (model, optimizer):
        one_step(model, optimizer, 0, result)
        counting = FaultyFiles(operations)
        monkeypatch.setattr(seam, "SYSTEM", counting)
        outcore.save(place / "counted", model, optimizer, wait=False).wait()
        assert counting.count > 20
        open_before = descriptors()
        for at in range(1, counting.count + 1):
            target = place / f"at-{at}"
            files = FaultyFiles(operations, at, kind, forever)
            monkeypatch.setattr(seam, "SYSTEM", files)
            told: list[OutcoreError] = []
            try:
                saving = outcore.save(target, model, optimizer, wait=False)
            except (DiskFullError, DiskWriteError) as error:  # before it returned
                told.append(error)
                told += one_step(model, optimizer, at, result)
            else:
                told += one_step(model, optimizer, at, result)
                try:
                    saving.wait()
                except (DiskFullError, DiskWriteError) as error:
                    told = [error, *(other for other in told if other is not error)]
                else:
                    assert not told
            monkeypatch.setattr(seam, "SYSTEM", seam.Files())
            if told:
                assert len(told) == 1
                assert kind != "ENOSPC" or isinstance(told[0], DiskFullError)
                assert str(tmp_path) in str(told[0])
            if not told or target.exists():
                outcore.verify(target)
            failed += not target.exists()
            assert not files.opened
            assert descriptors() == open_before
        result.weights = weights(model)
        if not forever:
            assert not list(place.glob(".tmp-*"))
        assert (failed > 15) == (kind != "short")
        train(model, optimizer, SHAPE, range(1))
        outcore.save(place / "after", model, optimizer)
        assert not list(place.glob(".tmp-*"))
        outcore.verify(place / "after")
    result.assert_equal(undisturbed(counting.count + 1, chunk_size="256KiB"))


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
@pytest.mark.parametrize("kind", ["eio", "flip"])
def test_a_disk_tier_that_fails(kind: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the chunk meets it: the save, or training, or both; no other error, and nothing hangs."""
    settings = TIGHT.settings(tmp_path)
    seed_all(2)
    opened = faulty.install(monkeypatch)
    with offloaded(SHAPE, **settings) as (model, optimizer):
        result = Result()
        for step in range(2):
            one_step(model, optimizer, step, result)
        [file] = opened
        file.faults = [Fault("read", file.counts["read"] + at, kind)]  # type: ignore[arg-type]
        try:
            saving = outcore.save(tmp_path / "saved", model, optimizer, wait=False)
            train(model, optimizer, SHAPE, range(2, 4))
            saving.wait()
        except OutcoreError:
            file.faults = []
        else:
            outcore.verify(tmp_path / "saved")
        try:
            outcore.release(model)
        except OutcoreError:
            assert not (tmp_path / "saved").exists()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("nth", [10, 25, 40])
def test_what_failed_is_not_begun_again_by_another_thread(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever met the error comes to say so late; the others go on meanwhile."""
    give_up = Saving._give_up

    def late(self: Saving, error: BaseException) -> None:
        time.sleep(0.6)
        give_up(self, error)

    monkeypatch.setattr(Saving, "_give_up", late)
    monkeypatch.setattr(Saving, "_write_beside", lambda *_: time.sleep(0.005))
    with offloaded(SHAPE, chunk_size="256KiB") as (model, optimizer):
        train(model, optimizer, SHAPE, range(1))
        monkeypatch.setattr(seam, "SYSTEM", FaultyFiles(("write",), nth))
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        with suppress(DiskWriteError):
            train(model, optimizer, SHAPE, range(1, 2))
        with pytest.raises(DiskWriteError):
            saving.wait()
        assert not list(tmp_path.iterdir())
        optimizer.zero_grad()


def test_the_error_is_raised_once_by_the_run_and_always_by_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: nn.Module, optimizer: outcore.Optimizer, name: str) -> Saving:
        with monkeypatch.context() as patch:
            patch.setattr(seam, "SYSTEM", FaultyFiles(("rename",), 1))
            saving = outcore.save(tmp_path / name, model, optimizer, wait=False)
            saving.finish()
        return saving

    with offloaded(SHAPE) as (model, optimizer):
        failing(model, optimizer, "a")
        with pytest.raises(DiskWriteError):
            outcore.save(tmp_path / "b", model, optimizer, wait=False)
        outcore.save(tmp_path / "b", model, optimizer, wait=False).wait()
        saving = failing(model, optimizer, "c")
        for _ in range(2):
            with pytest.raises(DiskWriteError):
                saving.wait()
        train(model, optimizer, SHAPE, range(1))
        failing(model, optimizer, "d")
        with pytest.raises(DiskWriteError):
            outcore.load(tmp_path / "b", model, optimizer)
        failing(model, optimizer, "e")
        with pytest.raises(DiskWriteError):
            outcore.release(model)
        with pytest.raises(outcore.errors.StateError):
            model(**SHAPE.batch(1))
    assert sorted(place.name for place in tmp_path.iterdir()) == ["b"]


def test_an_interrupt_within_the_handing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt reaches the loop, and the save is given up."""

    class Interrupted(seam.Files):
        def write(self, fd: int, view: memoryview, offset: int) -> int:
            if len(view) > 100_000:
                raise KeyboardInterrupt
            return super().write(fd, view, offset)

    monkeypatch.setattr(Saving, "_write_beside", lambda *_: time.sleep(0.005))
    with offloaded(SHAPE, prefetch=False) as (model, optimizer):
        train(model, optimizer, SHAPE, range(1))
        monkeypatch.setattr(seam, "SYSTEM", Interrupted())
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, SHAPE, range(1, 3))
        with pytest.raises(CheckpointError, match="KeyboardInterrupt came in between"):
            saving.wait()
        with pytest.raises(KeyboardInterrupt):
            outcore.save(tmp_path / "two", model, optimizer)
        monkeypatch.setattr(seam, "SYSTEM", seam.Files())
        optimizer.zero_grad()
        outcore.save(tmp_path / "three", model, optimizer)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["three"]


ENDS = {
    "end": "",
    "exit": "sys.exit(3)",
    "error": "raise RuntimeError('of the user')",
    "child": "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)",
    "killed": "os.kill(os.getpid(), 9)",
}

CHOSEN = [pytest.param(end, marks=pytest.mark.slow) if end in ("exit", "child") else end for end in ENDS]

SCRIPT = """
import os, sys
from pathlib import Path
import outcore
from checkpoint.runs import STACK, adamw, seed_all, train
from exact.shapes import built
from outcore.checkpoint import files as seam
import threading

class Slow(seam.Files):
    def sync(self, fd):
        threading.Event().wait(0.2)
        super().sync(fd)

model = built(STACK, 7)
optimizer = adamw(model.parameters())
outcore.offload(model, optimizer, budget=outcore.Budget(host="1GiB"), prefetch={prefetch})
seam.SYSTEM = Slow()
train(model, optimizer, STACK, range(1))
outcore.save(sys.argv[1], model, optimizer, wait=False)
assert not Path(sys.argv[1]).exists()
{end}
"""


@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", CHOSEN)
def test_the_end_of_the_process(end: str, prefetch: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=ENDS[end], prefetch=prefetch), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    code = {"exit": 3, "error": 1, "killed": -9}.get(end, 0)
    assert done.returncode == code, done.stderr
    if end == "killed":
        assert not (tmp_path / "saved").exists()
        assert outcore.Checkpoints(tmp_path).latest() is None
    else:
        outcore.verify(tmp_path / "saved")
        assert [place.name for place in tmp_path.iterdir()] == ["saved"]


def test_the_end_of_a_process_that_looked_at_a_checkpoint_first(tmp_path: Path) -> None:
    """What ends with the process ends in one order, whatever was imported when."""
    looked = """import outcore
from outcore.errors import OutcoreError
try:
    outcore.verify("/nowhere")
except OutcoreError:
    pass
"""
    script = SCRIPT.format(end="", prefetch=True).replace("import outcore\n", looked, 1)
    assert looked in script
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr
    outcore.verify(tmp_path / "saved")
