"""XLA devices, where torch_xla is: ``PJRT_DEVICE=CPU`` makes one of the CPU.

    PJRT_DEVICE=CPU pytest tests/exact/test_xla.py

The run in memory computes all on that device as plain torch_xla does, with gradients updated on the host as in outcore.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from exact.reference import Loop, MakeOptimizer, Result, in_memory, offloaded
from exact.shapes import SHAPES, Shape
from exact.test_matrix import adamw
from outcore.errors import UsageError
from outcore.memory.device import Offers, find, offers

torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed")
if "PJRT_DEVICE" not in os.environ:
    pytest.skip("PJRT_DEVICE names no XLA device", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch_xla's own, of what it imports

STACK, TIED = (next(s for s in SHAPES if s.name == name) for name in ("stack", "tied"))


def sgd(params: Any) -> outcore.SGD:
    return outcore.SGD(params, momentum=0.9)


def on_xla(
    shape: Shape,
    loop: Loop,
    disk: Path,
    make: MakeOptimizer = adamw,
    memory: str = "1600KiB",
    way: str = "keep",
) -> Result:
    budget = outcore.Budget(device=memory, host="20MiB", disk=disk)
    activations = outcore.Activations(way)  # type: ignore[arg-type]
    return offloaded(
        shape, loop, make, device="xla", budget=budget, chunk_size="128KiB", activations=activations
    )


@pytest.mark.parametrize("way", ["keep", "recompute"])
@pytest.mark.parametrize("shape", [STACK, TIED], ids=lambda shape: shape.name)
def test_fp32(shape: Shape, way: str, tmp_path: Path) -> None:
    """Up to the last bits: a compiled graph's bits depend on what else is in it, and graphs are cut elsewhere.

    SGD, since Adam makes whole steps of a gradient that is nothing but rounding.
    """
    loop = Loop(steps=2, accumulate=2, precision="fp32")
    expected = in_memory(shape, loop, sgd, "xla", finish=torch_xla.sync)
    found = on_xla(shape, loop, tmp_path, sgd, way=way)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=0)
    for name, values in expected.weights.items():
        torch.testing.assert_close(found.weights[name], values, rtol=1e-5, atol=1e-6, msg=name)


def test_placement(tmp_path: Path) -> None:
    """What leaves the device between uses changes no bit."""
    loop = Loop(steps=2)
    on_xla(STACK, loop, tmp_path, memory="800KiB").assert_equal(on_xla(STACK, loop, tmp_path, memory="1GiB"))


def test_what_it_offers() -> None:
    assert offers(find("xla")) == Offers(streams=False, resizing=False, storages=False)
    with pytest.raises(UsageError, match="no device xla:99"):
        find("xla:99")
