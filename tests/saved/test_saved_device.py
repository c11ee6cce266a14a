"""Offloaded activations on a device: down to the host behind compute, up again ahead of backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outcore
from exact.devices import Device
from exact.families import FAMILIES
from exact.reference import Loop
from exact.shapes import SHAPES, Shape
from exact.test_device import on_device
from exact.test_matrix import adamw

SOME = [
    shape for shape in SHAPES + FAMILIES if shape.name in ("stack", "attention", "twice", "dropout", "t5")
]


@pytest.mark.parametrize("shape", SOME, ids=lambda shape: shape.name)
@pytest.mark.parametrize("way", ["offload", "recompute+offload"])
def test_ways(shape: Shape, way: Any, device: Device, tmp_path: Path) -> None:
    loop = Loop(accumulate=2, clip=0.5)
    expected = device.reference(shape, loop, adamw)
    activations = outcore.Activations(way)
    for settings in ({}, {"prefetch": False}):
        on_device(shape, loop, tmp_path, device, activations=activations, **settings).assert_equal(expected)
    device.check()
