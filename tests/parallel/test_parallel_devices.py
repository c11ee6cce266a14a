"""Ranks on accelerators, and on devices of different kinds: the bits of ranks on CPUs, within the device's budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.devices import Lift, trained
from parallel.loops import Way, several
from parallel.test_parallel_matrix import STAGES, same
from parallel.together import Team, values

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stages(accumulate: int, two: Team, tmp_path: Path) -> None:
    ways = [Way(stage, accumulate, steps=2) for stage in STAGES]
    on_cpu = values(two.run(several, tmp_path / "cpu", ways=ways))
    on_device = values(two.run(trained, tmp_path / "emu", lifts=[Lift(way) for way in ways]))
    for expected, found in zip(on_cpu, on_device, strict=True):
        for k, way in enumerate(ways):
            assert same(found[k], expected[k]), way
            assert found[k]["losses"] == expected[k]["losses"], way
            held = found[k]["snapshot"]
            assert found[k]["counted"] <= held.peak["device"] <= held.budget["device"], way
            assert held.peak["host"] <= held.budget["host"], way
            assert held.moved["device in"] > 0


def test_devices_of_different_kinds(two: Team, tmp_path: Path) -> None:
    """A CPU and an accelerator train one model: the bits of two CPUs, since the emulated one computes as they do."""
    ways = [Way(stage, steps=2, precision="bf16") for stage in STAGES]
    kinds = ("cpu", "emu")
    on_cpu = values(two.run(several, tmp_path / "cpu", ways=ways))
    mixed = values(two.run(trained, tmp_path / "mixed", lifts=[Lift(way, kinds) for way in ways]))
    for expected, found in zip(on_cpu, mixed, strict=True):
        for k, way in enumerate(ways):
            assert same(found[k], expected[k]), way
            assert found[k]["losses"] == expected[k]["losses"], way


@pytest.mark.parametrize("stage", [*STAGES])
def test_late_copies(stage: str, two: Team, tmp_path: Path) -> None:
    """Every copy is late by a random time; with a disk and little of everything."""
    way = Way(stage, accumulate=2, steps=3, host="4MiB", disk=True)
    [expected, _] = values(two.run(several, tmp_path / "cpu", ways=[way]))
    for seed in (1, 2):
        late = {"delay_seed": seed, "max_delay_ms": 1.0}
        lifts = [Lift(way, memory="2MiB")]
        for found in values(two.run(trained, tmp_path / "emu", lifts=lifts, emulator=late)):
            assert same(found[0], expected[0])
