"""fp16 on ranks: a loss scale that overflows on one rank is lowered on all, and the steps are those of one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from parallel.devices import Lift, computing_on, lifted
from parallel.loops import Way, inputs, rows_of, stack
from parallel.test_parallel_matrix import off
from parallel.together import Place, Team, alone, values

OVERFLOWS = (0, 2)


def scaled(place: Place) -> list[dict[str, Any]]:
    """In two of the steps the loss of the last rank's rows is so large that its scaled gradients are inf."""
    found = []
    for lift in place.settings["lifts"]:
        with computing_on(lift.kind(place)), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps are skipped
            model = stack()
            optimizer = lifted(model, lift, place)
            scales = []
            for step in range(4):
                huge = 1e5 if step in OVERFLOWS and place.rank == place.ranks - 1 else 1.0
                loss = model(rows_of(inputs(step), place)).float().square().mean() * huge
                optimizer.backward(loss)
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                scales.append(optimizer.loss_scale.value)
            weights = {name: value.clone() for name, value in outcore.weights(model)}
            found.append({"weights": weights, "scales": scales, "skipped": optimizer.skipped_steps})
            outcore.release(model)
            del model, optimizer
    return found


@pytest.mark.emulated
@pytest.mark.parametrize(
    "kinds", [pytest.param(("cpu",), marks=pytest.mark.slow), ("cpu", "emu")], ids=["cpu", "mixed"]
)
def test_ranks_agree_on_the_scale(kinds: tuple[str, ...], two: Team, tmp_path: Path) -> None:
    lifts = [Lift(Way(stage, precision="fp16"), kinds) for stage in ("optimizer", "parameters")]
    ranks = values(two.run(scaled, tmp_path, lifts=lifts))
    expected = alone(scaled, tmp_path, lifts=[Lift(Way(precision="fp16"))])[0]
    for found in ranks:
        for k, result in enumerate(found):
            assert result["scales"] == expected["scales"] == [32768.0, 32768.0, 16384.0, 16384.0]
            assert result["skipped"] == expected["skipped"] == len(OVERFLOWS)
            # gradients are rounded to fp16; a step more or less would be ten times as far off
            assert off(result["weights"], expected["weights"]) < 1e-3
            for name, value in ranks[0][k]["weights"].items():
                assert torch.equal(result["weights"][name], value)
