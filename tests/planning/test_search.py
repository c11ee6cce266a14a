"""The searched plan against every single way with fixed settings: never slower by more than 3 %."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import outcore
from outcore.errors import BudgetError
from outcore.integrations.shapes import shape
from outcore.planning.machine import DESCRIBED
from outcore.planning.outcome import Limits
from outcore.planning.planner import Planner
from outcore.planning.settings import Settings
from outcore.planning.subject import Subject
from planning.accuracy import CPU

SEQUENCES = 8
GIB = 1 << 30
MACHINES = {
    "rtx4080": DESCRIBED["rtx4080"],
    "a100-80g": DESCRIBED["a100-80g"],
    "gh200": DESCRIBED["gh200"],
    "cpu": CPU,
}
BUDGETS = {
    "roomy": (12 * GIB, 16 * GIB, 0),
    "small device": (GIB, 16 * GIB, 0),
    "disk": (GIB, GIB, 64 * GIB),
}


@pytest.fixture(scope="module", params=["gpt2", pytest.param("gpt2-medium", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest) -> Subject:
    model = shape(request.param).model
    ids = torch.empty((SEQUENCES, 256), dtype=torch.long, device="meta")
    return Subject(model, outcore.AdamW(model.parameters()), {"input_ids": ids, "labels": ids})


def singles() -> Iterator[Settings]:
    """Each way by itself: activations kept, recomputed, or in slices; the step in as many passes as it may be."""
    ways = [outcore.Activations("keep"), outcore.Activations("recompute")]
    for micro, way, chunk in itertools.product((8, 4, 2, 1), ways, (8 << 20, 32 << 20)):
        yield Settings(micro, SEQUENCES // micro, way, chunk)
    for rows in (1, 2, 4):
        yield Settings(SEQUENCES, 1, outcore.Activations("recompute", rows), 8 << 20)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_searched_plan_is_as_fast_as_any_single_way(subject: Subject, machine: str, budget: str) -> None:
    where = MACHINES[machine]
    device, host, disk = BUDGETS[budget]
    limits = Limits(None if where.device is None else device, host, disk)
    planner = Planner(subject, where, limits)
    fixed = {str(s): planner.fits(s) for s in singles()}
    times = {name: found.seconds for name, found in fixed.items() if found is not None}
    if not times:
        with pytest.raises(BudgetError):
            planner.best(SEQUENCES, 1, None, None, None, None, 1)
        return
    best = planner.best(SEQUENCES, 1, None, None, None, None, 1)
    assert best.outcome.seconds <= 1.03 * min(times.values()), (str(best), times)
