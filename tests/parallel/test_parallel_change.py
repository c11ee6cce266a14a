"""Parameters that several ranks change together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.errors import UsageError
from parallel.loops import Way, offloaded, stack, train
from parallel.together import Place, Team, values


def clamped(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.clamp(-0.05, 0.05)


def change(place: Place) -> dict[str, Any]:
    model, way = stack(), place.settings["way"]
    optimizer = offloaded(model, way, place)
    train(model, optimizer, way, place)
    outcore.change(model, clamped)
    changed = dict(outcore.weights(model))
    found = train(model, optimizer, way, place, first=way.steps)
    outcore.release(model)
    return {**found, "changed": changed}


@pytest.mark.parametrize("sharding", ["parameters", "none"])
def test_all_ranks_have_what_was_changed(sharding: str, two: Team, tmp_path: Path) -> None:
    way = Way(sharding=sharding, disk=sharding == "parameters", steps=2)
    first, second = values(two.run(change, tmp_path, way=way))
    model = stack()
    for name, value in first["changed"].items():
        assert value.abs().max() <= 0.05, name
        assert value.shape == model.get_parameter(name).shape
        assert torch.equal(value, second["changed"][name])
        assert torch.equal(first["weights"][name], second["weights"][name])
        assert not torch.equal(value, first["weights"][name])


def change_apart(place: Place) -> str:
    model, way = stack(), Way(steps=1)
    optimizer = offloaded(model, way, place)
    with pytest.raises(UsageError) as raised:
        outcore.change(model, lambda name, value: value + place.rank)
    train(model, optimizer, way, place)
    outcore.release(model)
    return str(raised.value)


def test_ranks_that_change_differently_are_told(two: Team, tmp_path: Path) -> None:
    for said in values(two.run(change_apart, tmp_path)):
        assert "was changed to other values on one rank than on another" in said


def change_failing(place: Place) -> str:
    model, way = stack(), Way(steps=1)
    optimizer = offloaded(model, way, place)

    def fails(name: str, value: torch.Tensor) -> torch.Tensor:
        if place.rank == 1:
            raise ValueError("no such value")
        return value

    with pytest.raises(Exception, match="no such value") as raised:
        outcore.change(model, fails)
    train(model, optimizer, way, place)
    outcore.release(model)
    return type(raised.value).__name__


def test_what_a_function_raises_on_one_rank_is_raised_on_all(two: Team, tmp_path: Path) -> None:
    assert values(two.run(change_failing, tmp_path))[1] == "ValueError"
