"""A checkpoint of any number of ranks loads on any other, to the bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from checkpoint.faulty_files import FaultyFiles
from checkpoint.test_descriptors import FEW, Counting, of
from outcore.checkpoint import descriptors, pieces
from outcore.checkpoint import files as seam
from outcore.checkpoint.files import Files
from outcore.errors import CheckpointError, DiskFullError
from parallel.loops import Way, offloaded, stack, train
from parallel.test_parallel_matrix import STAGES, same
from parallel.together import Place, Team, alone, run, values

BF16 = Way(precision="bf16", steps=2)


def write(place: Place) -> dict[str, Any]:
    """Train, save, go on."""
    way = Way(place.settings["stage"], precision="bf16", steps=2, host="4MiB", disk=True)
    model = stack()
    optimizer = offloaded(model, way, place)
    train(model, optimizer, way, place)
    torch.manual_seed(place.rank)
    outcore.save(place.path / "saved", model, optimizer, {"position": 7}, wait=False).wait()
    found = train(model, optimizer, way, place, first=2)
    found["random"] = torch.rand(3)
    outcore.release(model)
    return found


def again(place: Place) -> dict[str, Any]:
    """Load, save anew, go on."""
    way = Way(place.settings["stage"], precision="bf16", steps=2)
    model = stack()
    optimizer = offloaded(model, way, place)
    train(model, optimizer, Way(steps=1), place, first=9)
    extra = outcore.load(place.path / place.settings.get("saved", "saved"), model, optimizer)
    assert extra in ({"position": 7}, None)
    outcore.save(place.path / place.settings["copy"], model, optimizer, extra)
    found = train(model, optimizer, way, place, first=2)
    found["random"] = torch.rand(3)
    outcore.release(model)
    return found


def content(path: Path) -> dict[str, Any]:
    """The bytes of all parameters, moments and buffers; hyperparameters and steps."""
    files = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith("state-")]
    body = json.loads((path / "manifest.json").read_text())["body"]
    return {file.name: file.read_bytes() for file in files} | {"optimizer": body["optimizer"]}


def digests(path: Path) -> list[Any]:
    """Of each parameter: one, or those of the stretches that were written."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    return [piece["digest"] for piece in body["parameters"].values()]


def test_any_number_of_ranks_loads_in_any_other(two: Team, three: Team, tmp_path: Path) -> None:
    first = values(two.run(write, tmp_path, stage="parameters"))
    resumed = values(two.run(again, tmp_path, stage="none", copy="by-two"))
    for rank, found in enumerate(resumed):
        assert same(found, first[rank])
        assert torch.equal(found["random"], first[rank]["random"])
    other = values(three.run(again, tmp_path, stage="gradients", copy="by-three"))
    alone(again, tmp_path, stage="none", copy="by-one")
    assert same(other[0], other[2])
    for copy in ("by-two", "by-three", "by-one"):
        outcore.verify(tmp_path / copy)
        assert content(tmp_path / copy) == content(tmp_path / "saved"), copy
    assert any(isinstance(digest, list) for digest in digests(tmp_path / "saved"))
    assert all(isinstance(digest, str) for digest in digests(tmp_path / "by-one"))


def test_a_checkpoint_of_one_process_loads_on_ranks(two: Team, tmp_path: Path) -> None:
    alone(write, tmp_path, stage="none")
    for stage in STAGES:
        values(two.run(again, tmp_path, stage=stage, copy=f"by-{stage}"))
        assert content(tmp_path / f"by-{stage}") == content(tmp_path / "saved")


def full(place: Place) -> Any:
    """A rank's disk is full: nobody saves, everybody goes on."""
    model = stack()
    optimizer = offloaded(model, BF16, place)
    train(model, optimizer, BF16, place)
    before = seam.SYSTEM
    bad = place.settings["bad"]
    if place.rank == bad:
        seam.SYSTEM = FaultyFiles((place.settings["operation"],), place.settings["at"], "ENOSPC")
    try:
        with pytest.raises(DiskFullError, match="" if place.rank == bad else f"rank {bad}"):
            outcore.save(place.path / "saved", model, optimizer)
    finally:
        seam.SYSTEM = before
    assert not (place.path / "saved").exists()
    found = train(model, optimizer, BF16, place, first=2)
    outcore.save(place.path / "saved", model, optimizer)
    outcore.release(model)
    return found


@pytest.mark.parametrize(
    ("bad", "operation", "at"),
    [(0, "write", 1), (0, "write", 9), (1, "write", 4), pytest.param(1, "sync", 1, marks=pytest.mark.slow)],
)
def test_a_full_disk_keeps_all_from_saving_and_none_from_training(
    bad: int, operation: str, at: int, two: Team, tmp_path: Path
) -> None:
    found = values(two.run(full, tmp_path, bad=bad, operation=operation, at=at))
    assert same(found[0], found[1])
    outcore.verify(tmp_path / "saved")
    assert not list(tmp_path.glob(".tmp-*"))


def damaged(place: Place) -> None:
    """The newest checkpoint is damaged in a slice: all ranks pass over it."""
    model = stack()
    optimizer = offloaded(model, BF16, place)
    series = outcore.Checkpoints(place.path / "series", keep=2)
    for step in range(3):
        train(model, optimizer, Way(steps=1), place, first=step)
        series.save(step, model, optimizer, {"step": step})
    assert series.steps() == [1, 2]
    if place.rank == 0:
        [file] = sorted((series.path(2)).glob("parameters-*"))
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(bytes(data))
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert series.restore(model, optimizer) == (1, {"step": 1})
    with pytest.raises(CheckpointError):
        outcore.load(series.path(2), model, optimizer)
    outcore.release(model)


def test_a_damaged_checkpoint_is_passed_over_by_all(two: Team, tmp_path: Path) -> None:
    values(two.run(damaged, tmp_path))


class Deadly(Files):
    """Kills the process in the middle of a save."""

    def sync(self, fd: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(place: Place) -> None:
    model = stack()
    optimizer = offloaded(model, BF16, place)
    series = outcore.Checkpoints(place.path / "series")
    train(model, optimizer, Way(steps=1), place)
    series.save(1, model, optimizer)
    train(model, optimizer, Way(steps=1), place, first=1)
    if place.rank == place.settings["bad"]:
        seam.SYSTEM = Deadly()
    series.save(2, model, optimizer)


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_is_killed_in_a_save_leaves_the_one_before(bad: int, two: Team, tmp_path: Path) -> None:
    for rank, outcome in enumerate(run(killed, 3, tmp_path, bad=bad)):
        assert outcome.seconds < 30
        if rank == bad:
            assert outcome.code == -signal.SIGKILL
        else:
            assert outcome.error is not None
            assert outcome.error[0] == "PeerError", outcome.error
            assert f"rank {bad}" in outcome.error[1]
            assert "the save of step-2" in outcome.error[1]
    series = outcore.Checkpoints(tmp_path / "series")
    assert series.steps() == [1]
    outcore.verify(series.path(1))
    values(two.run(again, tmp_path, stage="parameters", saved="series/step-1", copy="series/step-3"))
    assert not [path for path in series.path(1).parent.iterdir() if path.name.startswith(".tmp-")]


def test_a_damaged_stretch_is_found(two: Team, tmp_path: Path) -> None:
    """By one process and by other ranks, wherever it is."""
    values(two.run(write, tmp_path, stage="parameters"))
    [file] = (tmp_path / "saved").glob("parameters-*")
    data = bytearray(file.read_bytes())
    for at in (-5, len(data) // 2):
        damaged = bytearray(data)
        damaged[at] ^= 1
        file.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match="damaged"):
            outcore.verify(tmp_path / "saved")
        for outcome in two.run(again, tmp_path, stage="gradients", copy="never"):
            assert outcome.error is not None
            assert outcome.error[0] == "CheckpointError"


def many_files(place: Place) -> tuple[int, set[int], list[str]]:
    """Each tensor has a file of its own: the most that were open, how often they were synced, and which."""
    files = Counting()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "FILE_BYTES", 1)
        patch.setattr(descriptors, "MOST", FEW)
        patch.setattr(seam, "SYSTEM", files)
        model = stack()
        optimizer = offloaded(model, Way(place.settings["stage"]), place)
        train(model, optimizer, Way(steps=1), place)
        outcore.save(place.path / "saved", model, optimizer)
        most = files.most
        outcore.load(place.path / "saved", model, optimizer)
        assert files.most <= 2 * FEW + 1
        outcore.release(model)
    synced = [name for operation, name in files.calls if operation == "sync"]
    return most, of(files, "sync"), synced


@pytest.mark.parametrize("stage", ["parameters", "none"])
def test_few_files_are_open_and_each_rank_makes_each_durable_once(
    stage: str, two: Team, tmp_path: Path
) -> None:
    first, second = values(two.run(many_files, tmp_path, stage=stage))
    kept = {path.name for path in (tmp_path / "saved").iterdir()}
    assert len(kept) > 40
    assert set(first[2]) == kept
    assert first[1] == second[1] == {1}
    assert first[0] <= 2 * FEW + 1  # where the first rank writes what is small, and where all write the rest
    assert second[0] <= FEW
    outcore.verify(tmp_path / "saved")
