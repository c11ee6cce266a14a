"""No wait of the transfer code can be left out: with copies that are slow or late, a run without it goes wrong.

`docs/device.md` lists the waits; each has a line in `WAITS`, which takes it out, or a test of its own below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import outcore
from exact.reference import Loop, Result, in_memory, offloaded
from exact.shapes import SHAPES, Shape, built
from exact.test_matrix import adamw
from outcore.chunks.pool import Access
from outcore.errors import OutcoreError, StateError
from outcore.memory.device import Streams
from outcore.model.descent import Descent
from outcore.model.device_stage import DeviceStage
from outcore.offloaded import engine_of

pytestmark = pytest.mark.emulated


def emulated(shape: Shape, loop: Loop, disk: Path, device: str = "8MiB", host: str = "24MiB") -> Result:
    budget = outcore.Budget(device=device, host=host, disk=disk)
    return offloaded(shape, loop, adamw, device="emu", budget=budget, chunk_size="128KiB")


@pytest.mark.parametrize(
    "shape",
    [*SHAPES[:4], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[4:10])],
    ids=lambda shape: shape.name,
)
def test_late_copies(shape: Shape, emu: ModuleType, tmp_path: Path) -> None:
    """Twenty orders of arrival for each shape: every copy is late by a random time."""
    loop = Loop(steps=2, accumulate=2)
    expected = in_memory(shape, loop, adamw)
    for seed in range(20):
        emu.configure(delay_seed=seed + 1, max_delay_ms=0.5)
        emulated(shape, loop, tmp_path).assert_equal(expected)
        assert emu.races() == []


class Hasty(torch.Event):
    """An event that says at once that it has come."""

    def query(self) -> bool:
        return True


Mutation = Callable[[pytest.MonkeyPatch], None]


def without(owner: type, wait: str) -> Mutation:
    """The wait does nothing."""
    return lambda patch: patch.setattr(owner, wait, lambda self, *args: None)


def hasty(copies: str) -> Mutation:
    """Polls of the events on one copy stream always succeed."""

    def record(self: Streams, stream: torch.Stream) -> torch.Event:
        kind = Hasty if stream == getattr(self, copies) else torch.Event
        event = kind(self.device)
        event.record(stream)
        return event

    return lambda patch: patch.setattr(Streams, "record", record)


def unsynchronised(caller: str) -> Mutation:
    """One caller of `DeviceStage.synchronize` no longer waits."""
    synchronize = DeviceStage.synchronize

    def only_for_others(self: DeviceStage) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            synchronize(self)

    return lambda patch: patch.setattr(DeviceStage, "synchronize", only_for_others)


WAITS = {
    "await fill": without(DeviceStage, "_await_fill"),
    "await use": without(DeviceStage, "_await_use"),
    "await gradients": without(Descent, "_await_gradients"),
    "await arrival": without(Descent, "_await_arrival"),
    "poll of arrivals": hasty("copy_out"),
    "before the norm": unsynchronised("settle_gradients"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_can_be_left_out(
    wait: str, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation proof: without any one of the waits, a run with slow copies races or goes wrong."""
    shape, loop = SHAPES[0], Loop(steps=3, accumulate=2)
    expected = in_memory(shape, loop, adamw)
    emu.configure(h2d_gbps=0.02, d2h_gbps=0.05)
    slow = dict(device="2MiB", host="1200KiB")  # so small that host frames are used again at once
    emulated(shape, loop, tmp_path, **slow).assert_equal(expected)
    WAITS[wait](monkeypatch)

    def run() -> None:
        emulated(shape, loop, tmp_path, **slow).assert_equal(expected)
        emu.check()

    with pytest.raises((emu.RaceError, AssertionError, RuntimeError, OutcoreError)):
        run()
    emu.clear_races()


def backward_only(disk: Path, host: str = "14MiB") -> tuple[nn.Module, outcore.AdamW, Shape]:
    """A pass whose gradients are still on their way down."""
    shape = SHAPES[0]
    model = built(shape)
    optimizer = adamw(model.parameters())
    budget = outcore.Budget(device="8MiB", host=host, disk=disk)
    outcore.offload(model, optimizer, device="emu", budget=budget, chunk_size="128KiB")
    shape.loss(model(**shape.batch(0))).backward()
    return model, optimizer, shape


def test_gradients_that_are_cleared_do_not_come_later(
    emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`zero_grad` waits for gradients on their way; without the wait their chunks can't be forgotten."""
    emu.configure(d2h_gbps=0.005)
    norms = []
    for cleared in (False, True):
        model, optimizer, shape = backward_only(tmp_path)
        if cleared:
            optimizer.zero_grad()
            shape.loss(model(**shape.batch(0))).backward()
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        outcore.release(model)
    assert norms[0] == norms[1]
    model, optimizer, shape = backward_only(tmp_path)
    with monkeypatch.context() as patch:
        unsynchronised("forget_gradients")(patch)
        with pytest.raises(AssertionError):
            optimizer.zero_grad()
    outcore.release(model)


def test_a_checkpoint_sees_gradients_on_their_way(
    emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save` waits before it asks whether gradients are there; without the wait it overlooks those to come."""
    monkeypatch.setattr(Descent, "poll", lambda self: None)  # nothing lands before it is waited for
    model, optimizer, _ = backward_only(tmp_path, host="1GiB")
    with monkeypatch.context() as patch:
        unsynchronised("_check")(patch)
        assert not engine_of(model).present()
        outcore.save(tmp_path / "mutated", model, optimizer)
    with pytest.raises(StateError):
        outcore.save(tmp_path / "saved", model, optimizer)
    outcore.release(model)


def test_release_waits_for_copies(emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is given back when `release` returns; without its wait buffers on their way are not."""
    emu.configure(d2h_gbps=0.005)
    held = []
    for mutated in (False, True):
        model, _, _ = backward_only(tmp_path)
        stage = engine_of(model).stage
        with monkeypatch.context() as patch:
            if mutated:
                unsynchronised("shut")(patch)
            outcore.release(model)
        held.append(stage.pinned)
        torch.accelerator.synchronize()
    assert held[0] == 0 < held[1]


LIFTS = {"await lift": without(DeviceStage, "_await_lift"), "poll of lifts": hasty("copy_in")}


@pytest.mark.parametrize("mutated", [None, *LIFTS])
def test_the_host_gets_a_chunk_back_after_its_copy(
    mutated: str | None, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        LIFTS[mutated](monkeypatch)
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
