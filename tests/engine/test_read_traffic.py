"""How much a pass over weights on disk reads: what is not kept, and nothing twice, whatever is read ahead."""

from __future__ import annotations

from pathlib import Path

import torch

import outcore
from exact.shapes import Stack


def test_inference_reads_the_weights_once_a_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack(24).eval()
    total = sum(parameter.numel() * 2 for parameter in model.parameters())
    outcore.offload(model, budget=outcore.Budget(host=int(total * 0.45), disk=tmp_path), device="cpu")
    passes = []
    try:
        with torch.no_grad():
            for _ in range(5):
                before = outcore.snapshot(model).moved["disk read"]
                model(torch.randn(3, 12, 32))
                passes.append((outcore.snapshot(model).moved["disk read"] - before) / total)
    finally:
        outcore.release(model)
    assert sum(passes[1:]) <= 4 + 0.1, passes  # what is read ahead for the next pass counts in this one
    room = 0.45 - 3 / 24  # but for activations, the unit in use and the next one
    assert sum(passes[2:]) <= 3 * (1 - room) + 2 / 24, passes
