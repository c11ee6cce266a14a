"""Plans know what is offloaded: peaks on each tier are those of runs, within 5 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from exact.families import FAMILIES
from outcore.errors import BudgetError
from outcore.model.saved import store
from planning.accuracy import CPU, EMU, Case, measure, off, predict

SHAPES = {shape.name: shape for shape in FAMILIES}
WAYS = pytest.mark.parametrize("way", ["offload", "recompute+offload"])


@pytest.fixture(autouse=True)
def pages_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SMALLEST", 4096)


def case(name: str, **settings: Any) -> Case:
    batch = {key: torch.cat([value] * 4) for key, value in SHAPES[name].batch(0).items()}
    return Case(SHAPES[name].build, batch, **settings)


@WAYS
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_on_the_cpu(name: str, way: str, tmp_path: Path) -> None:
    run = case(name, way=way, accumulate=2)
    limits = run.limits(run.subject())
    planned = predict(run, limits, CPU)
    found = measure(run, limits, tmp_path)
    assert abs(off(planned.peak["host"], found.peak["host"])) < 0.05
    assert abs(off(planned.settled["host"], found.settled["host"])) < 0.05
    assert abs(off(planned.peak["disk"], found.peak["disk"])) < 0.05


@pytest.mark.emulated
@WAYS
def test_on_a_device(way: str, tmp_path: Path, emu: ModuleType) -> None:
    emu.configure(h2d_gbps=EMU.link_in / 1e9, d2h_gbps=EMU.link_out / 1e9)
    run = case("gpt2", way=way, device="emu")
    low, limits = run.least(run.subject()), run.limits(run.subject())
    assert low.device is not None
    limits = replace(
        limits, device=low.device * 105 // 100
    )  # a frame more or less doesn't count for much then
    planned = predict(run, limits, EMU)
    found = measure(run, limits, tmp_path)
    assert abs(off(planned.peak["device"], found.peak["device"])) < 0.05
    assert abs(off(planned.peak["host"], found.peak["host"])) < 0.05
    assert abs(off(planned.moved["device out"], found.moved["device out"])) < 0.05


@WAYS
def test_the_least_budget_is_enough_and_less_is_not(way: str, tmp_path: Path) -> None:
    run = case("gpt2", way=way, chunk="64KiB")
    low = run.least(run.subject())
    enough = replace(low, host=low.host * 110 // 100, disk=1 << 30)
    assert measure(run, enough, tmp_path).peak["host"] <= enough.host
    with pytest.raises(BudgetError):
        measure(run, replace(low, host=low.host * 85 // 100, disk=1 << 30), tmp_path)


def test_offloading_needs_less_host_memory_than_keeping() -> None:
    """What a block saves is not there while others run, and what a checkpoint saves neither."""
    least = {}
    for way in ("keep", "offload", "recompute", "recompute+offload"):
        run = case("gpt2", way=way, chunk="64KiB")
        least[way] = run.least(run.subject()).host
    assert least["offload"] < least["keep"]
    assert least["recompute+offload"] <= least["recompute"]
