"""Batches divided among ranks of different speed: the result of the whole batch, whoever takes how much of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from exact.shapes import Stack
from outcore.errors import PeerError, UsageError
from outcore.model.rowless import NothingCounted
from outcore.model.shares import Shares
from outcore.offloaded import engine_of
from parallel.devices import Lift, computing_on, lifted
from parallel.loops import ROWS, Way, inputs, offloaded, stack
from parallel.test_parallel_matrix import off, same
from parallel.together import Place, Team, alone, run, values

CPUS, MIXED = ("cpu",), ("emu", "cpu")
CLOSE = 1e-6


def divided(place: Place) -> dict[str, Any]:
    """Train on shares of each batch by a clock that only the rows drive: the last rank needs three times as long."""
    lift, split, rows = place.settings["lift"], place.settings["split"], place.settings["rows"]
    seconds, cost = 0.0, 3.0 if place.rank == place.ranks - 1 else 1.0
    taken, losses, norms = [], [], []
    with computing_on(lift.kind(place)):
        model = stack()
        optimizer = lifted(model, lift, place)
        engine = engine_of(model)
        shares = Shares(engine.ranks, split, lambda: seconds, engine.rowless)
        for step in range(lift.way.steps):
            for micro in range(lift.way.accumulate):
                with shares.part({"x": inputs(100 * step + micro)[:rows]}) as part:
                    loss = part.weigh(model(**part.batch).float().square().mean()) / lift.way.accumulate
                    optimizer.backward(loss)
                    seconds += cost * len(part.batch["x"])
                taken.append(part.rows)
                losses.append(loss.item())
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: value.clone() for name, value in outcore.weights(model)}
        steps = optimizer.steps
        outcore.release(model)
        del model, optimizer
    return {"weights": weights, "taken": taken, "losses": losses, "norms": norms, "steps": steps}


def compare(team: Team, path: Path, lift: Lift, rows: int) -> list[list[int]]:
    """By speed, evenly and in one process: all alike. What each rank took by speed, step by step."""
    settings: dict[str, Any] = {"lift": lift, "rows": rows}
    by_speed = values(team.run(divided, path / "speed", split="speed", **settings))
    even = values(team.run(divided, path / "even", split="even", **settings))
    one = alone(divided, path / "one", split="speed", lift=Lift(lift.way), rows=rows)
    for found in (*by_speed, *even):
        assert off(found["weights"], one["weights"]) < CLOSE
        assert found["norms"] == pytest.approx(one["norms"], rel=CLOSE)
        assert found["steps"] == one["steps"]
    for found in by_speed:
        assert off(found["weights"], even[0]["weights"]) < CLOSE
    mean = [sum(losses) / len(by_speed) for losses in zip(*(f["losses"] for f in by_speed), strict=True)]
    assert mean == pytest.approx(one["losses"], rel=CLOSE)
    return [found["taken"] for found in by_speed]


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("kinds", "stage"),
    [
        pytest.param(CPUS, "none", marks=pytest.mark.slow),
        pytest.param(CPUS, "gradients", marks=pytest.mark.slow),
        (MIXED, "parameters"),
    ],
)
def test_a_rank_throttled_to_a_third(kinds: tuple[str, ...], stage: str, two: Team, tmp_path: Path) -> None:
    """A step takes as long as the ideal division: nine rows and three, while even parts would take twice as long."""
    lift = Lift(Way(stage, steps=5), kinds)
    fast, slow = compare(two, tmp_path, lift, ROWS)
    assert fast == [6, 6, 9, 9, 9]
    assert slow == [6, 6, 3, 3, 3]
    assert max(fast[-1], 3 * slow[-1]) <= 1.15 * 0.75 * ROWS


def test_ranks_without_rows(two: Team, tmp_path: Path) -> None:
    """Batches of one row, with micro-batches: the rank that has none goes along, and changes nothing."""
    taken = compare(two, tmp_path, Lift(Way("parameters", accumulate=2, steps=3), CPUS), 1)
    assert taken == [[1] * 6, [0] * 6]


@pytest.mark.slow
def test_rows_that_do_not_divide(two: Team, tmp_path: Path) -> None:
    compare(two, tmp_path, Lift(Way("gradients", steps=4), CPUS), 7)


def different(place: Place) -> None:
    model = stack()
    lifted(model, Lift(Way(), CPUS), place)
    with pytest.raises(UsageError, match="rank 1 was given a batch of 5 rows and rank 0 one of 4"):
        outcore.shares(model).part(inputs(0)[: 4 + place.rank])
    outcore.release(model)


def test_all_ranks_must_be_given_the_same_batch(two: Team, tmp_path: Path) -> None:
    values(two.run(different, tmp_path))


def one_can_not(place: Place) -> None:
    model = stack()
    lifted(model, Lift(Way(), CPUS), place)
    outcore.shares(model).part(inputs(0) if place.rank else [])


@pytest.mark.slow
def test_a_batch_that_one_rank_can_not_divide(tmp_path: Path) -> None:
    first, second = run(one_can_not, 2, tmp_path)
    assert first.error is not None
    assert first.error[0] == UsageError.__name__
    assert second.error is not None
    assert second.error[0] == PeerError.__name__
    assert "rank 0 failed in the division of a batch" in second.error[1]


# -- one process --------------------------------------------------------------------------------------


def offloaded_stack() -> torch.nn.Module:
    return outcore.offload(stack(), budget=outcore.Budget(host="64MiB"), device="cpu")


def test_one_process_takes_everything() -> None:
    model = offloaded_stack()
    for split in ("even", "speed"):
        shares = outcore.shares(model, split)  # type: ignore[arg-type]
        batch = {"x": torch.arange(5), "others": [torch.zeros(5, 2), "label"]}
        with shares.part(batch) as part:
            assert torch.equal(part.batch["x"], batch["x"])
            assert part.batch["others"][1] == "label"
            loss = torch.tensor(2.0)
            assert part.weigh(loss) is loss
        assert (part.rows, part.weight) == (5, 1.0)
    outcore.release(model)


def test_what_can_not_be_divided_is_refused() -> None:
    model = offloaded_stack()
    with pytest.raises(UsageError, match="unknown split 'fast': it is 'even' or 'speed'"):
        outcore.shares(model, "fast")  # type: ignore[arg-type]
    shares = outcore.shares(model)
    for batch, why in (
        ({"x": torch.zeros(4), "y": torch.zeros(5)}, r"have \[4, 5\]"),
        (torch.tensor(1.0), r"have \[0\]"),
        (torch.zeros(0, 3), r"have \[0\]"),
        ("text", "plain tuples, lists and dicts"),
        (type("Own", (dict,), {})(x=torch.zeros(4)), "plain tuples, lists and dicts"),
    ):
        with pytest.raises(UsageError, match=why):
            shares.part(batch)
    outcore.release(model)


# -- losses that are not finite ---------------------------------------------------------------------------


def test_what_a_pass_without_rows_leaves() -> None:
    number, nan, some = 1, float("nan"), torch.tensor([1.0, 0.0])
    rowless = NothingCounted(lambda: number)
    unknown = torch.tensor([nan, 0.0])
    assert rowless.clean(unknown) is unknown  # no such pass
    rowless.begin()
    assert rowless.clean(unknown).tolist() == [0.0, 0.0]
    assert rowless.clean(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert rowless.clean(some).isnan().all()  # so what was cleaned was perhaps not nothing
    number = 2
    assert rowless.clean(unknown) is unknown
    rowless.begin()
    assert rowless.clean(some) is some
    rowless.begin()  # another part in the same pass
    assert rowless.clean(unknown) is unknown


def unlucky(place: Place) -> dict[str, Any]:
    """The rank without rows has a loss that is not finite."""
    way, bad = Way(place.settings["stage"], steps=3), place.settings["bad"]
    torch.manual_seed(7)
    model = Stack(3)
    optimizer = offloaded(model, way, place)
    shares, losses, norms = outcore.shares(model), [], []
    for step in range(way.steps):
        with shares.part(inputs(step)[:1]) as part:
            mean = model(part.batch).float().square().mean()
            loss = part.weigh(mean * bad if part.rows == 0 else mean)
            optimizer.backward(loss)
        losses.append(loss.item())
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in outcore.weights(model)}
    skipped = optimizer.skipped_steps
    outcore.release(model)
    return {"weights": weights, "losses": losses, "norms": norms, "skipped": skipped}


@pytest.mark.parametrize("stage", ["parameters", "none"])
def test_a_rank_without_rows_whose_loss_is_not_finite(stage: str, two: Team, tmp_path: Path) -> None:
    """The bits are those of a finite loss, and within 1e-6 those of one process."""
    one = alone(unlucky, tmp_path / "one", stage=stage, bad=1.0)
    finite = values(two.run(unlucky, tmp_path / "finite", stage=stage, bad=1.0))
    assert off(finite[0]["weights"], one["weights"]) < CLOSE
    for bad in (math.nan, math.inf):
        for found in values(two.run(unlucky, tmp_path / str(bad), stage=stage, bad=bad)):
            assert found["skipped"] == 0
            assert found["norms"] == pytest.approx(one["norms"], rel=CLOSE)
            assert same(found, finite[0])
        assert found["losses"] == [0.0] * 3
