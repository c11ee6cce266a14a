"""Real weights: SmolLM2-135M-Instruct under a host budget that holds less than its states."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from smollm2 import smollm2
from typer.testing import CliRunner, Result

import outcore
from outcore.cli.main import app
from outcore.integrations.transformers import build

__all__ = ["smollm2"]

TIGHT = "512MiB"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def ids(smollm2: Path) -> torch.Tensor:
    """The first 96 tokens of a module of the standard library."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    return tokenizer(Path(textwrap.__file__).read_text(), return_tensors="pt").input_ids[:, :96]


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def test_the_loss_is_the_same_streamed(
    smollm2: Path, plain: torch.nn.Module, ids: torch.Tensor, tmp_path: Path
) -> None:
    with torch.no_grad():
        expected = float(plain(input_ids=ids, labels=ids).loss)
    assert expected == pytest.approx(2.40, abs=0.02)
    built = build(smollm2, training=False)
    budget = outcore.Budget(host=TIGHT, disk=tmp_path)
    outcore.offload(built.model, budget=budget, device="cpu", weights=built.weights)
    try:
        with torch.no_grad():
            assert float(built.model(input_ids=ids, labels=ids, use_cache=False).loss) == expected
        peak = outcore.snapshot(built.model).peak["host"]
    finally:
        outcore.release(built.model)
    assert peak <= 512 << 20


def test_generate_writes_the_same_text(smollm2: Path, plain: torch.nn.Module, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = plain.generate(**prompt, max_new_tokens=12, do_sample=False)
    arguments = ("--model", smollm2, "--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu")
    result = call("generate", *arguments, "--host-memory", TIGHT, "--disk", tmp_path)
    assert "Paris" in result.stdout
    assert result.stdout == tokenizer.decode(out[0], skip_special_tokens=True) + "\n"


@pytest.mark.slow
def test_fine_tuning_starts_low_and_goes_lower(smollm2: Path, tmp_path: Path) -> None:
    sizes = ("--seq-len", 64, "--batch-size", 2, "--steps", 10, "--lr", 1e-4, "--device", "cpu")
    data = ("--data", textwrap.__file__, "--log-dir", tmp_path / "log")
    result = call("train", "--model", smollm2, *data, *sizes, "--host-memory", TIGHT, "--disk", tmp_path)
    assert "the model's tokenizer" in result.stdout
    with (tmp_path / "log" / "metrics.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    losses = [line["loss"] for line in lines]
    assert losses[0] < 4
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.3
    assert lines[-1]["moved"]["disk read"] > 0
    assert lines[-1]["peak"]["host"] <= 512 << 20
    assert not (tmp_path / "log" / "tokenizer.json").exists()
