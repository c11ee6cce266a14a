"""What is exported loads by plain ``from_pretrained``, with every weight rounded once from its master."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import outcore
from checkpoint.runs import STACK, TIGHT, offloaded, train, weights
from exact.families import FAMILIES
from exact.shapes import SHAPES, Shape
from outcore.checkpoint import export as module
from outcore.errors import UsageError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", FAMILIES, ids=lambda shape: shape.name)
def test_families(shape: Shape, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "fp32":
        monkeypatch.setattr(module, "SHARD_BYTES", 200_000)
    with offloaded(shape, **TIGHT.settings(tmp_path)) as (model, optimizer):
        train(model, optimizer, shape, range(1))
        outcore.export(model, tmp_path / "out", dtype)  # type: ignore[arg-type]
        expected, kind = weights(model), type(model)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (dtype == "fp32")
    loaded, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype is DTYPES[dtype]
    found = dict(loaded.named_parameters(remove_duplicate=False))
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(DTYPES[dtype])), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [kind.__name__]


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    with offloaded(SHAPES[3]) as (model, _):
        outcore.export(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "tokens.weight" in stored
    assert "head.weight" not in stored


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    with offloaded(STACK) as (model, _):
        outcore.export(model, tmp_path / "out", "fp32")
        expected = weights(model)
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(places["weight_map"].values())) > 3
    assert places["metadata"]["total_size"] == 4 * sum(value.numel() for value in expected.values())
    for name, file in places["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert torch.equal(opened.get_tensor(name), expected[name])


def test_buffers_are_exported(tmp_path: Path) -> None:
    with offloaded(SHAPES[10]) as (model, optimizer):
        train(model, optimizer, SHAPES[10], range(1))
        outcore.export(model, tmp_path / "out")
        buffers = dict(model.named_buffers())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name, buffer in buffers.items():
        assert torch.equal(stored[name], buffer)


def test_an_exported_model_trains_again(tmp_path: Path) -> None:
    """Weights come back through ``offload(weights=...)``."""
    gpt2 = FAMILIES[0]
    with offloaded(gpt2) as (model, _):
        outcore.export(model, tmp_path / "out", "fp32")
        expected = weights(model)
    with offloaded(gpt2, seed=8, weights=tmp_path / "out") as (model, _):
        for name, value in weights(model).items():
            assert torch.equal(value, expected[name])


def test_refusals(tmp_path: Path) -> None:
    with offloaded(STACK) as (model, _):
        with pytest.raises(UsageError, match="unknown precision"):
            outcore.export(model, tmp_path / "out", "int4")  # type: ignore[arg-type]
        (tmp_path / "out").mkdir()
        with pytest.raises(UsageError, match="exists already"):
            outcore.export(model, tmp_path / "out")
