"""A checkpoint of any number of ranks loads on any other, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from checkpoint.faulty_files import FaultyFiles
from outcore.checkpoint import files as seam
from outcore.errors import CheckpointError, DiskFullError
from parallel.loops import Way, offloaded, stack, train
from parallel.test_parallel_matrix import STAGES, same
from parallel.together import Place, Team, alone, values

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
    extra = outcore.load(place.path / "saved", model, optimizer)
    assert extra == {"position": 7}
    outcore.save(place.path / place.settings["copy"], model, optimizer, extra)
    found = train(model, optimizer, way, place, first=2)
    found["random"] = torch.rand(3)
    outcore.release(model)
    return found


def digests(path: Path) -> dict[str, Any]:
    """Names and digests of all parameters and moments, hyperparameters and steps."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    for piece in body["parameters"].values():
        del piece["file"], piece["start"]
        for moment in piece["moments"].values():
            del moment["file"], moment["start"]
    return {"parameters": body["parameters"], "optimizer": body["optimizer"], "buffers": body["buffers"]}


def test_any_number_of_ranks_loads_in_any_other(two: Team, three: Team, tmp_path: Path) -> None:
    first = values(two.run(write, tmp_path, stage="parameters"))
    resumed = values(two.run(again, tmp_path, stage="none", copy="by-two"))
    for rank, found in enumerate(resumed):
        assert same(found, first[rank])
        assert torch.equal(found["random"], first[rank]["random"])
    other = values(three.run(again, tmp_path, stage="gradients", copy="by-three"))
    alone(again, tmp_path, stage="none", copy="by-one")
    assert same(other[0], other[2])
    outcore.verify(tmp_path / "saved")
    for copy in ("by-two", "by-three", "by-one"):
        assert digests(tmp_path / copy) == digests(tmp_path / "saved"), copy


def test_a_checkpoint_of_one_process_loads_on_ranks(two: Team, tmp_path: Path) -> None:
    alone(write, tmp_path, stage="none")
    for stage in STAGES:
        values(two.run(again, tmp_path, stage=stage, copy=f"by-{stage}"))
        assert digests(tmp_path / f"by-{stage}") == digests(tmp_path / "saved")


def full(place: Place) -> Any:
    """The writer's disk is full: nobody saves, everybody goes on."""
    model = stack()
    optimizer = offloaded(model, BF16, place)
    train(model, optimizer, BF16, place)
    before = seam.SYSTEM
    if place.rank == 0:
        seam.SYSTEM = FaultyFiles(("write",), place.settings["at"], "ENOSPC")
    try:
        with pytest.raises(DiskFullError, match="rank 0" if place.rank else ""):
            outcore.save(place.path / "saved", model, optimizer)
    finally:
        seam.SYSTEM = before
    assert not (place.path / "saved").exists()
    found = train(model, optimizer, BF16, place, first=2)
    outcore.save(place.path / "saved", model, optimizer)
    outcore.release(model)
    return found


@pytest.mark.parametrize("at", [1, 4])
def test_a_full_disk_keeps_all_from_saving_and_none_from_training(at: int, two: Team, tmp_path: Path) -> None:
    found = values(two.run(full, tmp_path, at=at))
    assert same(found[0], found[1])
    outcore.verify(tmp_path / "saved")


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
