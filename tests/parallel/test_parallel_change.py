"""Parameters that several ranks change together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import ModelError, StateError, UsageError
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


class Tempered(nn.Module):
    """Has a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = stack(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


def single(place: Place) -> dict[str, Any]:
    model, way = Tempered(), Way(steps=2)
    optimizer = offloaded(model, way, place)
    model.to("cpu")
    train(model, optimizer, way, place)
    said = []
    for look in (model.scale.item, lambda: model.scale.data.clamp_(max=1.0)):
        with pytest.raises(StateError) as raised:
            look()
        said.append(str(raised.value))
    with outcore.gather(model):
        value = model.scale.item()
    outcore.change(model, lambda name, value: value.fill_(1.0) if name == "scale" else None)
    changed = dict(outcore.weights(model))["scale"].item()
    with pytest.raises(ModelError, match="was used outside"):
        sum(p.abs().sum() for p in model.inner.parameters())
    train(model, optimizer, way, place, first=way.steps)
    outcore.release(model)
    return {"said": said, "value": value, "changed": changed}


def test_one_element_is_read_and_changed_by_all(two: Team, tmp_path: Path) -> None:
    first, second = values(two.run(single, tmp_path))
    assert first == second
    assert first["value"] not in (1.0, 1.5)
    assert first["changed"] == 1.0
    for said in first["said"]:
        assert said.startswith("scale can't be read or written")
        assert "outcore.change(model, function)" in said
