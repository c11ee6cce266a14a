"""The matrix on the emulated accelerator: three tiers, race checker on, freed memory poisoned."""

from __future__ import annotations

import gc
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outcore
from exact.families import FAMILIES
from exact.reference import Loop, Result, in_memory, offloaded
from exact.shapes import SHAPES, Shape, built
from exact.test_matrix import adamw
from outcore.chunks.pool import Access
from outcore.engine import engine_of
from outcore.errors import BudgetError
from outcore.model.descent import Descent
from outcore.model.device_stage import DeviceStage

pytestmark = pytest.mark.emulated
ALL = pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)


def on_device(
    shape: Shape, loop: Loop, disk: Path, device: str | int = "8MiB", host: str = "14MiB", **settings: Any
) -> Result:
    settings.setdefault("chunk_size", "128KiB")
    budget = outcore.Budget(device=device, host=host, disk=disk)
    return offloaded(shape, loop, adamw, device="emu", budget=budget, **settings)


@ALL
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_placement(
    shape: Shape, accumulate: int, clip: float | None, emu: ModuleType, tmp_path: Path
) -> None:
    loop = Loop(accumulate=accumulate, clip=clip)
    expected = in_memory(shape, loop, adamw)
    on_device(shape, loop, tmp_path, device="1GiB").assert_equal(expected)
    on_device(shape, loop, tmp_path).assert_equal(expected)
    on_device(shape, loop, tmp_path, prefetch=False).assert_equal(expected)
    recompute = outcore.Activations("recompute")
    on_device(shape, loop, tmp_path, activations=recompute).assert_equal(expected)


@ALL
def test_fp32(shape: Shape, emu: ModuleType, tmp_path: Path) -> None:
    loop = Loop(precision="fp32", accumulate=2)
    on_device(shape, loop, tmp_path, "16MiB", "20MiB").assert_equal(in_memory(shape, loop, adamw))


@pytest.mark.parametrize("shape", SHAPES[:10], ids=lambda shape: shape.name)
def test_late_copies(shape: Shape, emu: ModuleType, tmp_path: Path) -> None:
    """Twenty orders of arrival for each shape: every copy is late by a random time."""
    loop = Loop(steps=2, accumulate=2)
    expected = in_memory(shape, loop, adamw)
    for seed in range(20):
        emu.configure(delay_seed=seed + 1, max_delay_ms=0.5)
        on_device(shape, loop, tmp_path, host="24MiB").assert_equal(expected)
        assert emu.races() == []


@ALL
def test_capacity_is_the_reported_peak(shape: Shape, emu: ModuleType, tmp_path: Path) -> None:
    """Training passes on a device as large as the peak that a run reports, with that as its budget."""
    loop = Loop(steps=2)
    expected = in_memory(shape, loop, adamw)
    peaks = []
    gc.collect()  # of the models of other tests a byte or two per parameter may still be there

    def measure(held: outcore.Snapshot) -> None:
        real = torch.accelerator.max_memory_allocated()
        assert real <= held.peak["device"]
        peaks.append(held.peak["device"])

    on_device(shape, loop, tmp_path, inspect=measure).assert_equal(expected)
    gc.collect()
    emu.configure(capacity=peaks[0])
    on_device(shape, loop, tmp_path, device=peaks[0]).assert_equal(expected)


@ALL
def test_too_small_a_device_is_refused_before_the_first_step(
    shape: Shape, emu: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError) as refusal:
        on_device(shape, Loop(), tmp_path, device=200_000)
    needed = refusal.value.needed
    assert refusal.value.tier == "device"
    with pytest.raises(BudgetError):
        on_device(shape, Loop(), tmp_path, device=needed - 1)


WAITS = [
    (DeviceStage, "_await_fill"),
    (DeviceStage, "_await_use"),
    (Descent, "_await_gradients"),
    (Descent, "_await_arrival"),
]


@pytest.mark.parametrize(("owner", "wait"), WAITS, ids=[name for _, name in WAITS])
def test_no_wait_can_be_left_out(
    owner: type, wait: str, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation proof: without any one of the waits, a run with slow copies races or goes wrong.

    The fifth, `DeviceStage._await_lift`, has a test of its own below.
    """
    shape, loop = SHAPES[0], Loop(steps=3, accumulate=2)
    expected = in_memory(shape, loop, adamw)
    emu.configure(h2d_gbps=0.02, d2h_gbps=0.05)
    slow = dict(device="2MiB", host="1200KiB")  # so small that host frames are used again at once
    on_device(shape, loop, tmp_path, **slow).assert_equal(expected)
    monkeypatch.setattr(owner, wait, lambda self, *args: None)

    def run() -> None:
        on_device(shape, loop, tmp_path, **slow).assert_equal(expected)
        emu.check()

    with pytest.raises((emu.RaceError, AssertionError, RuntimeError)):
        run()
    emu.clear_races()


@pytest.mark.parametrize("mutated", [False, True])
def test_the_host_gets_a_chunk_back_after_its_copy(
    mutated: bool, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host writes once `synchronize` has returned never reaches the copy; without the wait it does."""
    model = built(SHAPES[0])
    emu.configure(h2d_gbps=0.002)
    budget = outcore.Budget(device="8MiB", host="14MiB", disk=tmp_path)
    outcore.offload(model, device="emu", budget=budget)
    engine = engine_of(model)
    unit = engine.units[1]
    store = unit.stores[0]
    with engine.pool.guard(store.parameters, Access.READ):
        before = store.parameter(0).clone()
    if mutated:
        monkeypatch.setattr(DeviceStage, "_await_lift", lambda self, event: None)
    engine.residency.enter(unit, "forward")
    engine.stage.synchronize()

    def overwrite_and_compare() -> None:
        with engine.pool.guard(store.parameters, Access.WRITE), emu.host_watch():
            store.parameter(0).zero_()
        flat = engine.stage.views(unit)[0].new_empty(0)
        flat.set_(engine.stage.views(unit)[0].untyped_storage(), 0, before.shape)
        assert torch.equal(flat.cpu(), before)

    if mutated:
        with pytest.raises((emu.RaceError, AssertionError)):
            overwrite_and_compare()
    else:
        overwrite_and_compare()
    torch.accelerator.synchronize()
    engine.residency.leave(unit)
    outcore.release(model)
    emu.clear_races()
