"""What a plan says of each tier's peak against what a run holds."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exact.families import FAMILIES
from outcore.errors import BudgetError
from outcore.planning.outcome import Limits, Outcome
from planning.accuracy import CPU, EMU, Case, Measured, measure, off, predict

SHAPES = {shape.name: shape for shape in FAMILIES}
NAMES = ("gpt2", "llama", "t5", "mixtral")


def halved(*factors: tuple[Any, Any]) -> list[Any]:
    """All settings of all models: each run takes the half in which every two values meet, `make test-long` the rest."""
    found = []
    for number, name in enumerate(NAMES):
        for ones in itertools.product((0, 1), repeat=len(factors)):
            values = [factor[one] for factor, one in zip(factors, ones, strict=True)]
            rest = (number + sum(ones)) % 2
            found.append(pytest.param(name, *values, marks=pytest.mark.slow if rest else ()))
    return found


def case(name: str, **settings: Any) -> Case:
    return Case(SHAPES[name].build, SHAPES[name].batch(0), **settings)


def run_of(run: Case, limits: Limits, planned: Outcome, folder: Path) -> Measured:
    """A run as planned. What has left for the disk at a moment depends on how fast that is: a busy machine has three
    tries, which a plan that is wrong fails all the same."""
    for _ in range(3):
        found = measure(run, limits, folder)
        if abs(off(planned.peak["disk"], found.peak["disk"])) < 0.05:
            break
    return found


@pytest.mark.parametrize(
    ("name", "roomy", "recomputes", "accumulate"), halved((False, True), (False, True), (1, 4))
)
def test_on_the_cpu(name: str, roomy: bool, recomputes: bool, accumulate: int, tmp_path: Path) -> None:
    run = case(name, roomy=roomy, recomputes=recomputes, accumulate=accumulate)
    limits = run.limits(run.subject())
    planned = predict(run, limits, CPU)
    found = run_of(run, limits, planned, tmp_path)
    assert abs(off(planned.peak["host"], found.peak["host"])) < 0.05
    assert abs(off(planned.settled["host"], found.settled["host"])) < 0.05
    assert abs(off(planned.peak["disk"], found.peak["disk"])) < 0.05


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "recomputes", "accumulate"), halved((False, True), (1, 4)))
def test_on_a_device(name: str, recomputes: bool, accumulate: int, tmp_path: Path, emu: ModuleType) -> None:
    emu.configure(h2d_gbps=EMU.link_in / 1e9, d2h_gbps=EMU.link_out / 1e9)
    run = case(name, recomputes=recomputes, accumulate=accumulate, device="emu")
    limits = run.limits(run.subject())
    planned = predict(run, limits, EMU)
    found = run_of(run, limits, planned, tmp_path)
    for tier in ("device", "host", "disk"):
        assert abs(off(planned.peak[tier], found.peak[tier])) < 0.05, tier


@pytest.mark.parametrize("name", NAMES)
def test_the_least_budget_is_enough_and_less_is_not(name: str, tmp_path: Path) -> None:
    run = case(name, chunk="64KiB")
    subject = run.subject()
    low = run.least(subject)
    enough = type(low)(None, low.host * 110 // 100, 1 << 30)
    found = measure(run, enough, tmp_path)
    assert found.peak["host"] <= enough.host
    with pytest.raises(BudgetError):
        measure(run, type(low)(None, low.host * 85 // 100, 1 << 30), tmp_path)


def test_bytes_moved_are_of_the_size_that_a_run_moves(tmp_path: Path) -> None:
    run = case("gpt2", chunk="128KiB")
    limits = run.limits(run.subject())
    planned, found = predict(run, limits, CPU), measure(run, limits, tmp_path)
    for link in ("disk read", "disk write"):
        assert abs(off(planned.moved[link], found.moved[link])) < 0.6, link


def test_a_plan_is_the_same_each_time() -> None:
    run = case("llama")
    limits = run.limits(run.subject())
    assert predict(run, limits, CPU) == predict(run, limits, CPU)
