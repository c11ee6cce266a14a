"""The matrix on a device: three tiers, on the emulated accelerator and on a real one where there is one.

The emulated one has its race checker on and its freed memory poisoned; see `exact.devices`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outcore
from exact.devices import Device
from exact.families import FAMILIES
from exact.reference import Loop, Result, in_memory, offloaded
from exact.shapes import SHAPES, Shape
from exact.test_matrix import CROSSED, adamw
from outcore.errors import BudgetError
from outcore.memory.sizes import parse_size

ALL = pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)
MOST = 64 << 20
"""Bytes of a real accelerator's memory that the temporaries of its kernels may bring a test model to need."""


def on_device(
    shape: Shape,
    loop: Loop,
    disk: Path,
    device: Device,
    memory: str | int = "8MiB",
    host: str = "14MiB",
    **settings: Any,
) -> Result:
    """Train within ``memory``; a real accelerator, whose temporaries nobody here has seen, may ask for more."""
    settings.setdefault("chunk_size", "128KiB")
    nbytes = parse_size(memory)
    while True:
        budget = outcore.Budget(device=nbytes, host=host, disk=disk)
        try:
            return offloaded(shape, loop, adamw, device=device.name, budget=budget, **settings)
        except BudgetError as error:
            if device.emulator or error.tier != "device" or 2 * nbytes > MOST:
                raise
            nbytes *= 2


@ALL
@pytest.mark.parametrize(("accumulate", "clip"), CROSSED)
def test_placement(shape: Shape, accumulate: int, clip: float | None, device: Device, tmp_path: Path) -> None:
    loop = Loop(accumulate=accumulate, clip=clip)
    expected = device.reference(shape, loop, adamw)
    on_device(shape, loop, tmp_path, device, "1GiB").assert_equal(expected)
    on_device(shape, loop, tmp_path, device).assert_equal(expected)
    other: dict[str, Any] = {"prefetch": False} if clip is None else {"activations": "recompute"}
    on_device(shape, loop, tmp_path, device, **other).assert_equal(expected)
    device.check()


@ALL
def test_fp32(shape: Shape, device: Device, tmp_path: Path) -> None:
    loop = Loop(precision="fp32", accumulate=2)
    expected = device.reference(shape, loop, adamw)
    on_device(shape, loop, tmp_path, device, "16MiB", "20MiB").assert_equal(expected)


@ALL
def test_capacity_is_the_reported_peak(shape: Shape, device: Device, tmp_path: Path) -> None:
    """Training passes on a device as large as the peak that a run reports, with that as its budget."""
    loop = Loop(steps=2)
    expected = device.reference(shape, loop, adamw)
    peaks = []

    def measure(held: outcore.Snapshot) -> None:
        assert device.peak() <= held.peak["device"]
        peaks.append(held.peak["device"])

    device.watch()
    on_device(shape, loop, tmp_path, device, inspect=measure).assert_equal(expected)
    device.limit(peaks[0])
    budget = outcore.Budget(device=peaks[0], host="14MiB", disk=tmp_path)
    offloaded(shape, loop, adamw, device=device.name, budget=budget, chunk_size="128KiB").assert_equal(
        expected
    )


@ALL
def test_too_small_a_device_is_refused_before_the_first_step(
    shape: Shape, device: Device, tmp_path: Path
) -> None:
    def refusal(nbytes: int) -> BudgetError:
        budget = outcore.Budget(device=nbytes, host="14MiB", disk=tmp_path)
        with pytest.raises(BudgetError) as refused:
            offloaded(shape, Loop(), adamw, device=device.name, budget=budget, chunk_size="128KiB")
        return refused.value

    first = refusal(200_000)
    assert first.tier == "device"
    refusal(first.needed - 1)


@ALL
@pytest.mark.emulated
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_real_device_is_compared_with(shape: Shape, accumulate: int, emu: ModuleType) -> None:
    """A run in memory of a device, tried where its bits are known: the emulated one's are the CPU's."""
    loop = Loop(accumulate=accumulate)
    in_memory(shape, loop, adamw, emu.NAME).assert_equal(in_memory(shape, loop, adamw))
