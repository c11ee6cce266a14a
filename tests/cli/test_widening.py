"""On a processor without instructions for a dtype the command line widens products in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calling import TINY, text
from calling import outcore as command

import outcore
from outcore.model import matmuls


def test_a_training_run_widens_products_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "slow_dtypes", lambda: (torch.bfloat16,))
    monkeypatch.setattr("outcore.cli.plan.slow_dtypes", lambda: (torch.bfloat16,))
    try:
        where = ("--data", text(tmp_path), "--log-dir", tmp_path / "log", "--device", "cpu")
        done = command("train", *TINY, *where, "--steps", 1)
        assert done.exit_code == 0, done.output
        assert matmuls.is_widening()
        assert "multiplied as fp32" in " ".join(done.output.split())
    finally:
        outcore.widen_matmuls(False)
