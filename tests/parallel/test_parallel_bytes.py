"""What sharding saves and what it costs: memory per rank falls as 1/W, bytes on the wire are the least there can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import outcore
from exact.shapes import Stack
from outcore.offloaded import engine_of
from parallel.loops import Way, apart, offloaded, train
from parallel.test_parallel_matrix import off, same
from parallel.together import Place, Team, alone, values

LARGE = Way(host="256MiB", clip=None, steps=1)


def large() -> nn.Module:
    torch.manual_seed(7)
    return Stack(12)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def measured(place: Place) -> dict[str, Any]:
    """Bytes held between steps, and bytes received in a step."""
    found = {}
    for stage in place.settings["stages"]:
        way = Way(stage, host="256MiB", clip=None, steps=1, precision=place.settings["precision"])
        model = large()
        with apart(place.settings["apart"]):
            optimizer = offloaded(model, way, place)
        steps(model, optimizer, 1)
        before = outcore.snapshot(model)
        steps(model, optimizer, 2)
        after = outcore.snapshot(model)
        engine_of(model).settle()
        moved = (after.moved.get("wire", 0) - before.moved.get("wire", 0)) / 2
        found[stage] = {"held": held(model), "wire": moved}
        outcore.release(model)
    return found


def held(model: Any) -> int:
    """Bytes on the host that hold something."""
    return int(outcore.snapshot(model).held["host"]) - engine_of(model).pool.warm


def steps(model: Any, optimizer: Any, number: int) -> None:
    for _ in range(number):
        model(torch.ones(1, 2, 32)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("precision", "width", "states", "far"),
    [("fp32", 4, 8, True), ("bf16", 2, 10, False), pytest.param("bf16", 2, 10, True, marks=pytest.mark.slow)],
)
def test_memory_and_wire(
    precision: str, width: int, states: int, far: bool, two: Team, tmp_path: Path
) -> None:
    """What is gathered and summed crosses the wire where ranks are apart, and doesn't where they share memory."""
    stages = ("none", "optimizer", "gradients", "parameters")
    n, ranks = count(large()), 2
    for found in values(two.run(measured, tmp_path, stages=stages, precision=precision, apart=far)):
        table = {
            "none": (width + states) * n,
            "optimizer": (width + states) * n / ranks + width * n,
            "gradients": (width + states) * n / ranks + width * n,
            "parameters": (width + states) * n / ranks,
        }
        share = (ranks - 1) / ranks * n
        least = {
            "none": share * (far * width + 4),  # sums come back in fp32, as they are kept
            "optimizer": share * far * 2 * width,
            "gradients": share * far * 2 * width,
            "parameters": share * far * 3 * width,
        }
        for stage in stages:
            there = found[stage]["held"]
            if stage in ("optimizer", "gradients"):  # gone with the step, gathered by the next
                there += width * n
            assert there == pytest.approx(table[stage], rel=0.05), stage
            words = 0.02 * max(least[stage], share * width)
            assert least[stage] <= found[stage]["wire"] <= least[stage] + words, stage


def loaded(place: Place) -> int:
    with torch.device("meta"):
        model = Stack(12)
    way = Way(host="256MiB")
    offloaded(model, way, place, weights=place.path / "weights")
    seen = outcore.snapshot(model)
    weights = {name: crc32(value.numpy().tobytes()) for name, value in outcore.weights(model)}
    outcore.release(model)
    assert weights == place.settings["expected"]
    return max(seen.peak["host"], seen.held["host"])


def test_loading_does_not_multiply(four: Team, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    model = large()
    state = {name: p.detach() for name, p in model.named_parameters()}
    save_file(state, str(tmp_path / "weights" / "model.safetensors"))
    expected = {name: crc32(value.numpy().tobytes()) for name, value in state.items()}
    peaks = values(four.run(loaded, tmp_path, expected=expected))
    assert sum(peaks) <= 1.1 * alone(loaded, tmp_path, expected=expected)


def hybrid(place: Place) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = None if place.ranks == 1 else init_device_mesh("cpu", (2, 2))
    torch.manual_seed(7)
    model = Stack(3)
    optimizer = outcore.AdamW(model.parameters(), lr=2e-3)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(host="64MiB"),
        precision=outcore.Precision("fp32"),
        device="cpu",
        sharding=None if mesh is None else outcore.Sharding(mesh=mesh, timeout=20),
    )
    found = train(model, optimizer, Way(steps=2), place)
    found["held"] = held(model)
    outcore.release(model)
    return found


def test_hybrid(four: Team, tmp_path: Path) -> None:
    """Two replicas of two slices each."""
    found = values(four.run(hybrid, tmp_path))
    expected = alone(hybrid, tmp_path)
    for rank in found:
        assert rank["norms"] == found[0]["norms"]
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        assert same(rank, found[0])
        assert off(rank["weights"], expected["weights"]) < 1e-6
        assert rank["held"] == pytest.approx(expected["held"] / 2, rel=0.1)


class Language(nn.Module):
    """An embedding that is the head's weight as well, and takes most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 4096, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        found: torch.Tensor = self.head(h)
        return found


def language(place: Place) -> dict[str, Any]:
    torch.manual_seed(7)
    model = Language()
    way = Way(place.settings["stage"], host="64MiB", precision="bf16")
    with apart():  # or nothing that is gathered crosses a wire
        optimizer = offloaded(model, way, place)
    wire = []
    for step in range(4):
        before = outcore.snapshot(model).moved.get("wire", 0)
        ids = torch.arange(8).reshape(4, 2).chunk(place.ranks)[place.rank] + step
        model(ids).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).settle()
        wire.append(outcore.snapshot(model).moved.get("wire", 0) - before)
    weights = {name: value.clone() for name, value in outcore.weights(model)}
    outcore.release(model)
    return {
        "wire": wire,
        "weights": weights,
        "norms": [],
        "parameters": sum(w.numel() for w in weights.values()),
    }


def test_a_tied_weight_crosses_the_wire_no_more_often(two: Team, tmp_path: Path) -> None:
    """The head's forward and backward share a gather, the embedding's backward needs none."""
    whole = values(two.run(language, tmp_path / "whole", stage="none"))
    for found in values(two.run(language, tmp_path / "parts", stage="parameters")):
        assert same(found, whole[0])
        least = found["parameters"] / 2 * 6
        assert all(abs(wire / least - 1) < 0.05 for wire in found["wire"][1:]), found["wire"]
