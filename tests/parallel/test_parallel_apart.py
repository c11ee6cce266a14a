"""Ranks that miss parameters, and ranks that go apart: the result of one process, or an error that says who it was."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import outcore
from exact.shapes import WIDTH, Block, Stack, Twice, Unused
from outcore.errors import BudgetError, PeerError, UsageError
from outcore.memory.budget import DiskPath
from outcore.memory.limits import host_capacity
from outcore.memory.places import available_disk
from parallel.loops import Way, inputs, offloaded, rows_of, stack, train
from parallel.test_parallel_matrix import STAGES, compare, off, same
from parallel.together import Place, Team, alone, run, values


class Experts(nn.Module):
    """A block with four experts, of which each row goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x.mean(1)).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().view(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number].view(-1, 1, 1))
        return x + F.gelu(out)


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList([Block(), Experts(), Block(), Experts()])


def mixture() -> nn.Module:
    torch.manual_seed(7)
    return Mixture()


def unused() -> nn.Module:
    torch.manual_seed(7)
    return Unused()


def twice() -> nn.Module:
    torch.manual_seed(7)
    return Twice()


@pytest.mark.parametrize("build", [mixture, unused], ids=["experts", "unused"])
def test_parameters_that_some_ranks_miss(build: Any, two: Team, tmp_path: Path) -> None:
    [first, _] = compare(two, tmp_path, [Way(stage, steps=2) for stage in STAGES], build=build)
    assert all(same(first[0], result) for result in first[1:])


@pytest.mark.slow
@pytest.mark.parametrize("build", [mixture, unused, twice], ids=["experts", "unused", "twice"])
@pytest.mark.parametrize("sums", ["backward", "step"])
def test_parameters_that_some_ranks_miss_in_some_passes(
    build: Any, sums: str, two: Team, tmp_path: Path
) -> None:
    ways = [Way(stage, accumulate=2, steps=2, sums=sums) for stage in STAGES]
    [first, _] = compare(two, tmp_path, ways, build=build)
    assert all(same(first[0], result) for result in first[1:])


def nonfinite(place: Place) -> list[Any]:
    """One rank's gradient is NaN in the second step: it is skipped on all."""
    found = []
    for stage in STAGES:
        model = stack()
        optimizer = offloaded(model, Way(stage), place)
        for step in range(3):
            loss = model(rows_of(inputs(step), place)).square().mean()
            if step == 1 and place.rank == place.ranks - 1:
                loss = loss * math.nan
            loss.backward()
            with pytest.warns(RuntimeWarning, match="step skipped") if step == 1 else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        found.append((optimizer.skipped_steps, optimizer.nonfinite, optimizer.steps, _weights(model)))
        outcore.release(model)
    return found


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in outcore.weights(model)}


def test_a_gradient_that_is_nan_on_one_rank_skips_the_step_on_all(two: Team, tmp_path: Path) -> None:
    found = values(two.run(nonfinite, tmp_path))
    expected = alone(nonfinite, tmp_path)
    for rank in found:
        for ours, theirs in zip(rank, expected, strict=True):
            assert ours[0] == theirs[0] == 1
            assert ours[2] == theirs[2]
            assert off(ours[3], theirs[3]) < 1e-6


def other_order(place: Place) -> None:
    model = stack()
    optimizer = offloaded(model, Way(place.settings["stage"]), place)
    train(model, optimizer, Way(steps=1, clip=None), place)
    x = model.embed(inputs(1))
    model.blocks[1 if place.rank == 1 else 0](x)
    optimizer.step()


@pytest.mark.parametrize("stage", ["parameters", pytest.param("gradients", marks=pytest.mark.slow)])
def test_another_order_of_units_is_named(stage: str, tmp_path: Path) -> None:
    for outcome in run(other_order, 2, tmp_path, stage=stage):
        assert outcome.error is not None
        assert outcome.error[0] == PeerError.__name__
        assert "blocks.0" in outcome.error[1]
        assert "blocks.1" in outcome.error[1]
        assert "rank 1" in outcome.error[1]
        assert outcome.seconds < 30


def one_raises(place: Place) -> None:
    """A rank's disk fails while others wait for its slice."""
    model = stack()
    optimizer = offloaded(model, Way(place.settings["stage"]), place)
    train(model, optimizer, Way(steps=1, clip=None), place)
    if place.rank == 1:
        from outcore.errors import DiskReadError
        from outcore.offloaded import engine_of

        def broken(*args: Any) -> Any:
            raise DiskReadError("this disk is gone")

        engine_of(model).pool.guard = broken  # type: ignore[method-assign]
    train(model, optimizer, Way(steps=1), place, first=1)


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(stage, marks=() if stage in ("none", "parameters") else pytest.mark.slow)
        for stage in STAGES
    ],
)
def test_an_error_on_one_rank_is_told_to_all(stage: str, tmp_path: Path) -> None:
    first, second = run(one_raises, 2, tmp_path, stage=stage)
    assert second.error is not None
    assert second.error[0] == "DiskReadError"
    assert first.error is not None
    assert first.error[0] == PeerError.__name__, first.error
    assert "rank 1 failed in" in first.error[1]
    assert "this disk is gone" in first.error[1]
    assert first.seconds < 30


def differing(place: Place) -> None:
    torch.manual_seed(place.rank)
    with pytest.raises(UsageError, match="first values of embed: rank 1 has another than rank 0"):
        offloaded(Stack(2), Way(), place)
    torch.manual_seed(1)
    with pytest.raises(UsageError, match="layout of the model: rank 1"):
        offloaded(Stack(2 + place.rank), Way(), place)


def test_ranks_must_begin_alike(two: Team, tmp_path: Path) -> None:
    values(two.run(differing, tmp_path))


def refused(place: Place) -> None:
    model = stack()
    with pytest.raises(UsageError, match="no meta device"):
        outcore.offload(model, outcore.AdamW(model.parameters()), device="meta")
    model = stack()
    foreign = outcore.Foreign(torch.optim.RMSprop, model.parameters())
    with pytest.raises(UsageError, match="Foreign"):
        outcore.offload(model, foreign)


def test_what_ranks_can_not_do_is_refused(two: Team, tmp_path: Path) -> None:
    values(two.run(refused, tmp_path))


def reading(place: Place) -> Any:
    """Evaluation, `gather` and the optimizer's state between steps."""
    model = stack()
    optimizer = offloaded(model, Way(place.settings["stage"]), place)
    train(model, optimizer, Way(steps=1), place)
    with torch.no_grad():
        evaluated = model.eval()(inputs(9)).sum().item()
    model.train()
    with outcore.gather(model):
        gathered = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    train(model, optimizer, Way(steps=1), place, first=1)
    after = _weights(model)
    outcore.release(model)
    return evaluated, gathered, state, after


def test_reading_between_steps(two: Team, tmp_path: Path) -> None:
    expected = alone(reading, tmp_path, stage="none")
    for stage in STAGES:
        for found in values(two.run(reading, tmp_path, stage=stage)):
            assert found[0] == pytest.approx(expected[0], rel=1e-5)
            assert off(found[1], expected[1]) < 1e-6
            assert off(found[3], expected[3]) < 1e-6
            for index, moments in found[2].items():
                for name, value in moments.items():
                    assert torch.allclose(value, expected[2][index][name], rtol=1e-3, atol=1e-7), name


def more_than_the_machine(place: Place) -> int:
    """Each rank alone could have its budget. After the refusal the same ranks train."""
    model, before = stack(), len(dist.distributed_c10d._world.pg_map)
    disk = DiskPath(place.path, available_disk(place.path) * 2 // 3)
    for budget in (outcore.Budget(host=host_capacity() * 2 // 3), outcore.Budget(host="64MiB", disk=disk)):
        with pytest.raises(BudgetError, match="the ranks of this machine ask for"):
            outcore.offload(model, outcore.AdamW(model.parameters()), budget=budget, device="cpu")
    assert len(dist.distributed_c10d._world.pg_map) == before
    optimizer = offloaded(model, Way(), place)
    train(model, optimizer, Way(steps=1), place)
    return optimizer.skipped_steps


def test_budgets_of_ranks_are_held_against_their_machine_together(two: Team, tmp_path: Path) -> None:
    assert values(two.run(more_than_the_machine, tmp_path)) == [0, 0]
