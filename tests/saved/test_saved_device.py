"""Offloaded activations on a device: down to the host behind compute, up again ahead of backward."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outcore
from exact.devices import Device
from exact.families import FAMILIES
from exact.reference import Loop, in_memory, offloaded
from exact.shapes import SHAPES, Shape
from exact.test_device import on_device
from exact.test_matrix import adamw
from outcore.errors import OutcoreError
from outcore.model.saved.device_carrier import DeviceCarrier

SOON = ("attention",)
SOME = [
    pytest.param(shape, marks=[] if shape.name in SOON else [pytest.mark.slow], id=shape.name)
    for shape in SHAPES + FAMILIES
    if shape.name in (*SOON, "stack", "dropout", "twice", "experts", "t5", "mixtral")
]


@pytest.mark.parametrize("shape", SOME)
@pytest.mark.parametrize("way", ["offload", "recompute+offload"])
def test_ways(shape: Shape, way: Any, device: Device, tmp_path: Path) -> None:
    loop = Loop(accumulate=2, clip=0.5)
    expected = device.reference(shape, loop, adamw)
    activations = outcore.Activations(way)
    for settings in ({}, {"prefetch": False}):
        on_device(shape, loop, tmp_path, device, activations=activations, **settings).assert_equal(expected)
    device.check()


WAITS = ("_await_computed", "_await_copied", "_await_free", "_await_filled")


@pytest.mark.emulated
@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_can_be_left_out(
    wait: str, emu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation proof, as in `exact.test_device_waits`: without the wait, slow copies race or give other bits."""
    shape, loop = SHAPES[0], Loop(steps=2)
    expected = in_memory(shape, loop, adamw)
    emu.configure(h2d_gbps=0.02, d2h_gbps=0.05)

    def run() -> None:
        budget = outcore.Budget(device="3MiB", host="4MiB", disk=tmp_path)
        activations = outcore.Activations("offload")
        offloaded(
            shape, loop, adamw, device="emu", budget=budget, chunk_size="128KiB", activations=activations
        ).assert_equal(expected)
        emu.check()

    run()
    monkeypatch.setattr(DeviceCarrier, wait, lambda self, *args: None)
    with pytest.raises((emu.RaceError, AssertionError, RuntimeError, OutcoreError)):
        run()
    emu.clear_races()
