"""Several ranks give what one process gives on the whole batch, whatever they shard and wherever it lies."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.model.gathering import Gathering
from parallel.loops import Way, offloaded, several, stack, train
from parallel.together import Place, Team, alone, values

STAGES = ("none", "optimizer", "gradients", "parameters")
CLOSE = 1e-6


def off(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The relative error over all weights together."""
    assert found.keys() == expected.keys()
    difference = sum((found[name] - value).double().square().sum().item() for name, value in expected.items())
    return math.sqrt(difference / sum(v.double().square().sum().item() for v in expected.values()))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["norms"] == b["norms"] and all(
        torch.equal(value, b["weights"][name]) for name, value in a["weights"].items()
    )


def compare(team: Team, path: Path, ways: list[Way], **settings: Any) -> list[list[dict[str, Any]]]:
    """Train on ranks and alone; weights, norms and losses must be alike, and the ranks' weights the same."""
    found = values(team.run(several, path / "ranks", ways=ways, **settings))
    ranks = len(found)
    base_of = {way: replace(way, sharding="none", sums="backward", disk=False, host="64MiB") for way in ways}
    by_base = {
        base: alone(several, path / "alone", ways=[base], **settings)[0] for base in set(base_of.values())
    }
    for k, way in enumerate(ways):
        expected = by_base[base_of[way]]
        for other in found[1:]:
            assert same(found[0][k], other[k]), way
        weights = found[0][k]["weights"]
        assert off(weights, expected["weights"]) < CLOSE, way
        norms = zip(found[0][k]["norms"], expected["norms"], strict=True)
        assert all(math.isclose(a, b, rel_tol=CLOSE) for a, b in norms), way
        losses = [sum(one) / ranks for one in zip(*(rank[k]["losses"] for rank in found), strict=True)]
        expected_losses = zip(losses, expected["losses"], strict=True)
        assert all(math.isclose(a, b, rel_tol=CLOSE) for a, b in expected_losses), way
        for rank in found:
            held = rank[k]["snapshot"]
            assert held.peak["host"] <= held.budget["host"], way
    return found


@pytest.mark.parametrize(
    ("accumulate", "clip", "disk"), [(1, 0.5, False), (4, None, True)], ids=["host", "disk"]
)
def test_stages(accumulate: int, clip: float | None, disk: bool, two: Team, tmp_path: Path) -> None:
    host = "4MiB" if disk else "64MiB"
    ways = [Way(stage, accumulate, clip, host=host, disk=disk, steps=2) for stage in STAGES]
    [first, _] = compare(two, tmp_path, ways)
    assert all(same(first[0], result) for result in first[1:])
    if disk:
        assert all(result["snapshot"].moved["disk read"] for result in first)


def test_sums_once_a_step(two: Team, tmp_path: Path) -> None:
    """They have bits of their own, the same for all stages, and send each gradient once."""
    ways = [Way(stage, 3, steps=2, sums=sums) for sums in ("step", "backward") for stage in STAGES]
    [first, _] = compare(two, tmp_path, ways)
    once, each = first[:4], first[4:]
    assert all(same(once[0], result) for result in once[1:])
    assert all(same(each[0], result) for result in each[1:])
    assert not same(once[0], each[0])
    for a, b in zip(once, each, strict=True):
        assert a["snapshot"].moved["wire"] < b["snapshot"].moved["wire"]


def test_a_run_repeats_to_the_bit(two: Team, tmp_path: Path) -> None:
    ways = [Way(stage, accumulate=2, precision="bf16", steps=2) for stage in STAGES] * 2
    first, second = values(two.run(several, tmp_path, ways=ways))
    for k in range(4):
        assert same(first[k], first[k + 4])
        assert first[k]["losses"] == first[k + 4]["losses"]
        assert same(first[k], second[k])


def test_recomputed_blocks(two: Team, tmp_path: Path) -> None:
    compare(two, tmp_path, [Way(stage, activations="recompute", steps=2) for stage in STAGES])


def ahead(place: Place) -> list[Any]:
    """The same run with and without gathers ahead of use; how many there were."""
    proposed = 0
    propose = Gathering._propose

    def counted(gathering: Gathering, unit: Any) -> Any:
        nonlocal proposed
        found = propose(gathering, unit)
        proposed += found is not None
        return found

    found: list[Any] = []
    Gathering._propose = counted  # type: ignore[method-assign]
    try:
        for prefetch in (True, False):
            way = Way(steps=3)
            model = stack()
            optimizer = offloaded(model, way, place, prefetch=prefetch)
            proposed = 0
            result = train(model, optimizer, way, place)
            found.append((result, proposed))
            outcore.release(model)
    finally:
        Gathering._propose = propose  # type: ignore[method-assign]
    return found


def test_gathers_come_ahead_of_use(two: Team, tmp_path: Path) -> None:
    for with_it, without in values(two.run(ahead, tmp_path)):
        assert with_it[1] >= 6  # before each unit of a backward, once its order is known
        assert without[1] == 0
        assert same(with_it[0], without[0])


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_every_combination(disk: bool, two: Team, tmp_path: Path) -> None:
    host = "4MiB" if disk else "64MiB"
    ways = [
        Way(stage, accumulate, clip, host=host, disk=disk, sums=sums)
        for sums, accumulate, clip, stage in product(("backward", "step"), (1, 4), (None, 0.5), STAGES)
    ]
    [first, _] = compare(two, tmp_path, ways, patience=240)
    for k in range(0, len(ways), 4):
        assert all(same(first[k], result) for result in first[k + 1 : k + 4]), ways[k]
    for k in range(8):  # with one backward the two are the same sum
        assert same(first[k], first[k + 16])


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["backward", "step"])
def test_four_ranks(sums: str, four: Team, tmp_path: Path) -> None:
    ways = [Way(stage, 4, host="4MiB", disk=True, sums=sums) for stage in STAGES]
    found = compare(four, tmp_path, ways, patience=240)
    assert all(same(found[0][0], result) for result in found[0][1:])
