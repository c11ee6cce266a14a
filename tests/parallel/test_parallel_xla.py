"""A CPU and an XLA device train one model, where torch_xla is; see `exact.test_xla`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from parallel.loops import Way, stack, train
from parallel.together import Place, run, values

pytest.importorskip("torch_xla", reason="torch_xla is not installed")
if "PJRT_DEVICE" not in os.environ:
    pytest.skip("PJRT_DEVICE names no XLA device", allow_module_level=True)

WAY = Way("parameters", steps=2)


def trained(place: Place) -> dict[str, Any]:
    kind = place.settings["kinds"][place.rank]
    model = stack()
    optimizer = outcore.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(device=None if kind == "cpu" else "8MiB", host="64MiB"),
        precision=outcore.Precision("fp32"),
        activations=outcore.Activations("keep"),
        chunk_size="128KiB",
        device=kind,
        sharding=outcore.Sharding("parameters", timeout=300),
    )
    found = train(model, optimizer, WAY, place)
    found["moved"] = outcore.snapshot(model).moved["device in"]
    outcore.release(model)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # torch_xla's own, of what it imports
def test_a_cpu_and_an_xla_device(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    expected = values(run(trained, 2, tmp_path / "cpu", 600, kinds=("cpu", "cpu")))
    (tmp_path / "mixed").mkdir()
    found = values(run(trained, 2, tmp_path / "mixed", 600, kinds=("cpu", "xla")))
    assert found[0]["moved"] == 0
    assert found[1]["moved"] > 0
    for there, here in zip(expected, found, strict=True):
        torch.testing.assert_close(here["losses"], there["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(here["norms"], there["norms"], rtol=1e-5, atol=0)
        for name, wanted in there["weights"].items():
            torch.testing.assert_close(here["weights"][name], wanted, rtol=1e-5, atol=1e-6, msg=name)
    for name, wanted in found[0]["weights"].items():
        assert torch.equal(found[1]["weights"][name], wanted), name
