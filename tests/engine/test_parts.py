"""A model used through its submodules: as exact, within the budget and foreseen, without a forward of its own."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from engine.twin import Run, assert_idle, floats, same, spread
from exact.shapes import WIDTH, Block
from outcore.errors import BudgetError


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, WIDTH), Block(), Block())
        self.decoder = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 32))


def laps_of(run: Run) -> list[tuple[Hashable, ...]]:
    """The keys of the laps that begin from now on."""
    laps: list[Any] = []
    assert run.engine is not None
    begin = run.engine.clock.lap

    def lap(key: Hashable) -> bool:
        laps.append(key)
        return begin(key)

    run.engine.clock.lap = lap  # type: ignore[method-assign]
    return laps


def train(run: Run, seed: int, **sizes: int) -> None:
    x = run.cast(floats(seed, **sizes))
    loss = (run.model.decoder(run.model.encoder(x)) - x).float().square().mean()
    run.log.append(loss.item())
    run.optimizer.backward(loss)
    run.step()


@pytest.mark.parametrize("recompute", [False, True])
def test_training_and_evaluation_of_parts(recompute: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            train(run, step)
            x = run.cast(floats(step + 20))
            hidden = run.model.encoder(x)
            with torch.no_grad():  # between a forward and its backward
                run.log.append(run.model.encoder(run.cast(floats(50))).float().sum().item())
            twice = run.model.decoder(hidden) + run.model.decoder(run.model.encoder(x))
            run.optimizer.backward(twice.float().square().mean())
            with torch.no_grad():  # between a backward and its step
                run.log.append(run.model.decoder[0](hidden.detach()).float().sum().item())
            run.step()

    way = outcore.Activations("recompute" if recompute else "keep")
    same(script, tmp_path, build=Container, activations=way)


def test_a_step_is_one_lap_and_foreseen(tmp_path: Path) -> None:
    with spread(Container, budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run:
        laps = laps_of(run)
        assert run.engine is not None
        for step in range(4):
            x = run.cast(floats(step))
            hidden = run.model.encoder(x)
            with torch.no_grad():
                run.model.encoder(x)
            coming = [key for _, key in run.engine.clock.upcoming(3)]
            run.model.decoder(hidden).float().square().mean().backward()
            run.step()
        assert [lap[:3] for lap in laps] == [("forward", "encoder", True)] * 4
        assert ("forward", 3) in coming  # the decoder's first block


def test_evaluations_are_laps_of_their_own(tmp_path: Path) -> None:
    """Under `no_grad`, and where nobody keeps the graph; the blocks of a part begin none."""
    with spread(Container, budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run:
        laps = laps_of(run)
        x = run.cast(floats(0))
        for _ in range(2):
            with torch.no_grad():
                run.model.decoder(run.model.encoder(x))
            run.model.encoder(x)
        names = [lap[1:3] for lap in laps]
        assert names == [("encoder", False), ("decoder", False), ("encoder", True)] * 2
        assert run.engine is not None
        assert_idle(run.engine)


def test_a_budget_holds_for_parts(tmp_path: Path) -> None:
    with spread(Container, budget=outcore.Budget(host="4MiB", disk=tmp_path), precision="fp32") as run:
        with pytest.raises(BudgetError, match="activations"):
            train(run, 0, batch=64, length=64)
        run.optimizer.zero_grad()
        for step in range(3):
            train(run, step)


def test_a_part_after_the_model_goes_on_with_its_lap(tmp_path: Path) -> None:
    with spread(budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run:
        laps = laps_of(run)
        for step in range(2):
            x = run.cast(floats(step))
            hidden = run.model.blocks[0](run.model.embed(x))
            loss = run.loss(step) + run.model.head(hidden).float().square().mean()
            loss.backward()
            run.step()
        assert [lap[:2] for lap in laps] == [("forward", "embed"), ("forward", True)] * 2
