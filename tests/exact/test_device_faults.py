"""A disk that fails while parameters are lifted to the device: an error, and right values afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outcore
from exact.devices import Device
from exact.shapes import SHAPES, built
from faulty import Fault, install
from outcore.errors import TierError


def test_a_unit_lifted_by_half_is_not_used(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read in turn fails once: the forward raises, and the next one reads what was written."""
    shape = SHAPES[0]
    batch = {k: v.to(device.name) for k, v in shape.batch(0).items()}
    expected = None
    raised = 0
    for at in range(40):
        files = install(monkeypatch, [Fault("read", at, "eio")] if at else [])
        model = built(shape)
        budget = outcore.Budget(device="2MiB", host="700KiB", disk=tmp_path)
        outcore.offload(model, device=device.name, budget=budget, chunk_size="128KiB", prefetch=False)
        outputs = []
        with torch.no_grad():
            for _ in range(4):
                try:
                    outputs.append(model(**batch).cpu())
                except TierError:
                    raised += 1
        outcore.release(model)
        monkeypatch.undo()
        assert files
        if expected is None:
            expected = outputs[0]
        for output in outputs:
            assert torch.equal(output, expected), at
    assert raised > 0
