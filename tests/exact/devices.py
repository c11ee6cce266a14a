"""The device under test: the emulated accelerator, or a real one. One body of tests serves both.

[Note: What equal means on a device]
The emulated accelerator computes with the CPU's kernels, so runs on it are compared with the CPU's, in memory. A
real one has kernels of its own, so runs on it are compared with a run in memory on that same device; both must
then choose the same kernels and each kernel must give the same bits twice. Hence torch's deterministic
algorithms, a fixed cuBLAS workspace and no TF32 (the environment variables are read when the libraries start, so
they are set when tests are collected; elsewhere nobody reads them).

A real accelerator's memory can't be made smaller for a test. There the budget alone is the limit, and what
operators allocate inside themselves, which outcore does not see (`docs/limits.md`), is allowed for.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch

from emulated import accelerator
from exact.reference import Loop, MakeOptimizer, Result, in_memory
from exact.shapes import Shape

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

OPERATOR_WORKSPACE = 16 << 20
"""Bytes that the operators of a test model may take inside themselves on a real accelerator."""


@dataclass
class Device:
    """Where a test computes.

    Attributes:
        name: as torch and `outcore.offload` know it.
        emulator: the emulated accelerator's controls; ``None`` for a real one.
    """

    name: str
    emulator: ModuleType | None
    _before: int = field(default=0, init=False)

    def reference(self, shape: Shape, loop: Loop, make: MakeOptimizer) -> Result:
        """The same training in memory; see [Note: What equal means on a device]."""
        return in_memory(shape, loop, make, "cpu" if self.emulator else self.name)

    def watch(self) -> None:
        """From now on `peak` counts."""
        gc.collect()  # of the models of other tests a byte or two per parameter may still be there
        self._before = 0 if self.emulator else torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes that the device's own allocator counted since `watch`, less those it can't attribute."""
        counted = torch.accelerator.max_memory_allocated() - self._before
        return counted if self.emulator else counted - OPERATOR_WORKSPACE

    def limit(self, nbytes: int) -> None:
        """Make the device as small as that, where it can be."""
        gc.collect()
        if self.emulator:
            self.emulator.configure(capacity=nbytes)

    def check(self) -> None:
        """Raise what the device has noticed: races, or errors of kernels that ran late."""
        torch.accelerator.synchronize()
        if self.emulator:
            self.emulator.check()


def why_not_real() -> str | None:
    """Why there is no real accelerator to test on; ``None`` if there is one."""
    if accelerator.load.cache_info().currsize:
        return "the emulated accelerator hides any other in its process: run pytest -m accelerator by itself"
    return None if torch.accelerator.is_available() else "no accelerator"


@pytest.fixture(
    params=[
        pytest.param("emulated", marks=pytest.mark.emulated),
        pytest.param("real", marks=pytest.mark.accelerator),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each device in turn, under the mark that selects it."""
    if request.param == "emulated":
        yield Device(accelerator.NAME, request.getfixturevalue("emu"))
        return
    reason = why_not_real()
    if reason is not None:
        pytest.skip(reason)
    found = torch.accelerator.current_accelerator()
    assert found is not None
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield Device(found.type, None)
        torch.accelerator.synchronize()
    finally:
        torch.use_deterministic_algorithms(before)
        gc.collect()
        torch.accelerator.empty_cache()
