"""A run's directory of checkpoints: the newest that is whole, and how old ones go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import outcore
from checkpoint.runs import STACK, offloaded, train, weights
from outcore.checkpoint import files as seam
from outcore.checkpoint.files import Files
from outcore.errors import CheckpointError, UsageError


def flip(path: Path, offset: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = outcore.Checkpoints(tmp_path / "run", keep=2)
    with offloaded(STACK) as (model, optimizer):
        assert checkpoints.latest() is None
        assert checkpoints.restore(model, optimizer) is None
        for step in (1, 2, 9, 10):
            train(model, optimizer, STACK, range(1))
            assert checkpoints.save(step, model, optimizer, extra=[step]) == checkpoints.path(step)
        assert checkpoints.steps() == [9, 10]
        assert sorted(os.listdir(tmp_path / "run")) == ["step-10", "step-9"]
        assert checkpoints.latest() == tmp_path / "run" / "step-10"
        expected = weights(model)
        train(model, optimizer, STACK, range(1))
        assert checkpoints.restore(model, optimizer) == (10, [10])
        for name, value in weights(model).items():
            assert torch.equal(value, expected[name])


def test_an_old_one_goes_only_after_a_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no file system call are there fewer than ``keep`` whole checkpoints."""
    checkpoints = outcore.Checkpoints(tmp_path, keep=2)
    with offloaded(STACK) as (model, optimizer):
        checkpoints.save(1, model, optimizer)
        checkpoints.save(2, model, optimizer)
        seen = []

        class Watched(Files):
            def rename(self, old: Path, new: Path) -> None:
                super().rename(old, new)
                seen.append(checkpoints.steps())

        monkeypatch.setattr(seam, "SYSTEM", Watched())
        checkpoints.save(3, model, optimizer)
    assert seen == [[1, 2, 3], [2, 3]]


def test_damage_leads_to_the_one_before(tmp_path: Path) -> None:
    checkpoints = outcore.Checkpoints(tmp_path)
    with offloaded(STACK) as (model, optimizer):
        for step in range(5):
            checkpoints.save(step, model, optimizer, extra=step)
            train(model, optimizer, STACK, range(1))
        checkpoints.wait()
        flip(tmp_path / "step-4" / "manifest.json", 300)
        (tmp_path / "step-3" / "moments-00001.safetensors").unlink()
        assert checkpoints.latest() == tmp_path / "step-2"
        flip(tmp_path / "step-2" / "parameters-00001.safetensors")
        with pytest.warns(RuntimeWarning, match="passed over") as warned:
            assert checkpoints.restore(model, optimizer) == (1, 1)
        assert len(warned) == 3
        # the run comes by step 2 again, and the damaged one gives way; a whole one does not
        checkpoints.save(2, model, optimizer, extra="again", wait=True)
        assert outcore.load(tmp_path / "step-2", model, optimizer) == "again"
        with pytest.raises(UsageError, match="exists already"):
            checkpoints.save(2, model, optimizer)


def test_all_damaged(tmp_path: Path) -> None:
    checkpoints = outcore.Checkpoints(tmp_path)
    with offloaded(STACK) as (model, optimizer):
        checkpoints.save(1, model, optimizer)
        checkpoints.wait()
        (tmp_path / "step-1" / "manifest.json").unlink()
        with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            checkpoints.restore(model, optimizer)


def test_other_names_are_ignored(tmp_path: Path) -> None:
    for name in ("step-", "step-1.bak", "step--1", "step-٣", "step-01", ".tmp-step-7-1-ab", "7", "step-1\n"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-5").touch()
    checkpoints = outcore.Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    with pytest.raises(UsageError, match="at least one"):
        outcore.Checkpoints(tmp_path, keep=0)
    with offloaded(STACK) as (model, optimizer):
        for step in (-1, True, "1", 10**18):
            with pytest.raises(UsageError, match="whole number"):
                checkpoints.save(step, model, optimizer)  # type: ignore[arg-type]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, alive, link = tmp_path / ".tmp-a-1-00", tmp_path / ".tmp-b-1-00", tmp_path / ".tmp-link"
    elsewhere = tmp_path / "elsewhere"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
        (folder / "parameters-00001.safetensors").write_bytes(b"x")
    link.symlink_to(elsewhere)
    lock = Files().lock(alive)
    assert lock is not None
    with offloaded(STACK) as (model, optimizer):
        outcore.save(tmp_path / "one", model, optimizer)
        assert not dead.exists()
        assert (alive / "parameters-00001.safetensors").exists()
        assert (elsewhere / "parameters-00001.safetensors").exists()
        os.close(lock)
        outcore.save(tmp_path / "two", model, optimizer)
        assert not alive.exists()
        assert (elsewhere / "parameters-00001.safetensors").exists()


def damage(path: Path) -> None:
    """A byte of a tensor is another: only reading it shows that."""
    flip(path / "moments-00001.safetensors")


def test_what_was_passed_over_takes_no_place(tmp_path: Path) -> None:
    """A run that went back keeps as many as it is to, beside those that it has yet to come by."""
    checkpoints = outcore.Checkpoints(tmp_path, keep=2)
    with offloaded(STACK) as (model, optimizer):
        seen = []
        for step in (100, 200):
            checkpoints.save(step, model, optimizer, wait=True)
        damage(checkpoints.path(200))
        with pytest.warns(RuntimeWarning, match="passed over"):
            assert checkpoints.restore(model, optimizer) == (100, None)
        for step in (110, 120, 130):
            checkpoints.save(step, model, optimizer, wait=True)
            seen.append(checkpoints.steps())
        assert seen == [[100, 110, 200], [110, 120, 200], [120, 130, 200]]
        # in another process, which has not seen the damage, later steps take no place either
        again = outcore.Checkpoints(tmp_path, keep=2)
        again.save(140, model, optimizer, wait=True)
        assert again.steps() == [130, 140, 200]
        checkpoints.save(200, model, optimizer, wait=True)
        assert checkpoints.steps() == [140, 200]
        outcore.verify(checkpoints.path(200))
        checkpoints.save(210, model, optimizer, wait=True)
        assert checkpoints.steps() == [200, 210]


def test_what_was_passed_over_goes_with_what_is_as_old(tmp_path: Path) -> None:
    """A run that does not come by its step again keeps it no longer than good ones."""
    checkpoints = outcore.Checkpoints(tmp_path, keep=2)
    with offloaded(STACK) as (model, optimizer):
        seen = []
        for step in (100, 150):
            checkpoints.save(step, model, optimizer, wait=True)
        damage(checkpoints.path(150))
        with pytest.warns(RuntimeWarning, match="passed over"):
            checkpoints.restore(model, optimizer)
        for step in (140, 160, 180):
            checkpoints.save(step, model, optimizer, wait=True)
            seen.append(checkpoints.steps())
        assert seen == [[100, 140, 150], [140, 150, 160], [160, 180]]
