"""On a processor without instructions for a dtype the command line widens products in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from calling import TINY, text
from calling import outcore as command

import outcore
from outcore.model import matmuls


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor that has none for bf16."""
    monkeypatch.setattr(matmuls, "slow_dtypes", lambda: (torch.bfloat16,))
    monkeypatch.setattr("outcore.cli.plan.slow_dtypes", lambda: (torch.bfloat16,))
    yield
    outcore.widen_matmuls(False)


def test_a_training_run_widens_products_and_says_so(tmp_path: Path) -> None:
    where = ("--data", text(tmp_path), "--log-dir", tmp_path / "log", "--device", "cpu")
    done = command("train", *TINY, *where, "--steps", 1)
    assert done.exit_code == 0, done.output
    assert matmuls.is_widening()
    said = "bf16 on cpu (which it has no instructions for: matrices are multiplied as fp32)"
    assert said in " ".join(done.output.split())


def test_generation_widens_products(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    command("generate", "--model", tmp_path, "--prompt", "the cat")  # no tokenizer, which is found out later
    assert matmuls.is_widening()


def test_a_profile_is_of_what_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(*arguments: object) -> None:
        seen.append(matmuls.is_widening())
        raise outcore.OutcoreError("enough")

    monkeypatch.setattr("outcore.planning.measure.measure", measure)
    assert command("profile", "--device", "cpu", "--output", tmp_path / "machine.toml").exit_code == 1
    assert seen == [True]
