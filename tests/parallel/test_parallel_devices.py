"""Ranks on accelerators, and on devices of different kinds: the bits of ranks on CPUs, within the device's budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.errors import BudgetError, PeerError
from parallel.devices import (
    Lift,
    gathered_ahead,
    measured,
    on_a_device_as_large_as,
    one_device_fails,
    states_of,
    trained,
    trained_without_streams,
)
from parallel.loops import Way, several
from parallel.test_parallel_bytes import count, large
from parallel.test_parallel_matrix import STAGES, same
from parallel.together import Team, run, values

pytestmark = pytest.mark.emulated

SOME = [pytest.param(s, marks=() if s == "parameters" else pytest.mark.slow) for s in STAGES]


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
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
    ways = [Way(stage, steps=2, precision="bf16") for stage in ("optimizer", "parameters")]
    kinds = ("cpu", "emu")
    on_cpu = values(two.run(several, tmp_path / "cpu", ways=ways))
    mixed = values(two.run(trained, tmp_path / "mixed", lifts=[Lift(way, kinds) for way in ways]))
    for expected, found in zip(on_cpu, mixed, strict=True):
        for k, way in enumerate(ways):
            assert same(found[k], expected[k]), way
            assert found[k]["losses"] == expected[k]["losses"], way


@pytest.mark.parametrize("stage", SOME)
def test_a_device_without_streams(stage: str, two: Team, tmp_path: Path) -> None:
    """A CPU and an accelerator without streams, whose storages keep their size."""
    way = Way(stage, accumulate=2, steps=2)
    on_cpu = values(two.run(several, tmp_path / "cpu", ways=[way]))
    mixed = values(two.run(trained_without_streams, tmp_path / "emu", lifts=[Lift(way, ("cpu", "emu"))]))
    for expected, found in zip(on_cpu, mixed, strict=True):
        assert same(found[0], expected[0])
        assert found[0]["losses"] == expected[0]["losses"]
        assert found[0]["counted"] <= found[0]["snapshot"].peak["device"]


@pytest.mark.parametrize("stage", SOME)
def test_late_copies(stage: str, two: Team, tmp_path: Path) -> None:
    """Every copy is late by a random time; with a disk and little of everything."""
    way = Way(stage, accumulate=2, steps=3, host="4MiB", disk=True)
    [expected, _] = values(two.run(several, tmp_path / "cpu", ways=[way]))
    for seed in (1, 2):
        late = {"delay_seed": seed, "max_delay_ms": 1.0}
        lifts = [Lift(way, memory="2MiB")]
        for found in values(two.run(trained, tmp_path / "emu", lifts=lifts, emulator=late)):
            assert same(found[0], expected[0])


@pytest.mark.slow
def test_four_ranks(four: Team, tmp_path: Path) -> None:
    lifts = [
        Lift(Way(stage, accumulate, clip, steps=2, activations=activations), kinds)
        for stage in STAGES
        for accumulate, clip, activations in ((1, 0.5, "recompute"), (3, None, "keep"))
        for kinds in (("emu",), ("emu", "cpu"))
    ]
    on_cpu = values(four.run(several, tmp_path / "cpu", 240, ways=[lift.way for lift in lifts]))
    found = values(four.run(trained, tmp_path / "emu", 240, lifts=lifts))
    for expected, rank in zip(on_cpu, found, strict=True):
        for k, lift in enumerate(lifts):
            assert same(rank[k], expected[k]), lift
            assert rank[k]["losses"] == expected[k]["losses"], lift


def test_gathers_come_ahead_of_use(two: Team, tmp_path: Path) -> None:
    for with_it, without in values(two.run(gathered_ahead, tmp_path)):
        assert with_it[1]["gathers"] >= 6  # before each unit of a backward, once its order is known
        assert with_it[1]["lifts"] >= 6
        assert without[1] == {"gathers": 0, "lifts": 0}
        assert same(with_it[0], without[0])


def test_sums_alone_are_measured(two: Team, tmp_path: Path) -> None:
    """No pass goes over what a rank has of its own."""
    for sums, own in values(two.run(measured, tmp_path)):
        assert sums > 0
        assert own == 0


@pytest.mark.parametrize("far", [False, True])
def test_memory_wire_and_capacity(far: bool, two: Team, tmp_path: Path) -> None:
    """The host holds half of the states, the device none between steps; the wire carries the least there can be.

    That is two gathers, and the sums of ranks that share no memory.
    """
    n = count(large())
    found = values(two.run(states_of, tmp_path, apart=far))
    for rank in found:
        assert rank["host"] == pytest.approx(12 * n / 2, rel=0.05)
        assert rank["device"] < 0.05 * 4 * n
        assert 1 <= rank["wire"] / ((2 + far) * 4 * n / 2) <= 1.02
    values(two.run(on_a_device_as_large_as, tmp_path, peak=max(rank["peak"] for rank in found)))


@pytest.mark.slow
@pytest.mark.parametrize("others", ["cpu", "emu"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_device_without_room_is_told_to_all(stage: str, others: str, tmp_path: Path) -> None:
    first, second = run(one_device_fails, 2, tmp_path, 120, stage=stage, others=others)
    assert second.error is not None
    assert second.error[0] == BudgetError.__name__
    assert first.error is not None
    assert first.error[0] == PeerError.__name__, first.error
    assert "rank 1 failed in" in first.error[1]
    assert "device budget" in first.error[1]
