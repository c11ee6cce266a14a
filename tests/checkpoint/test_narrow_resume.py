"""Checkpoints of narrow moments: to the bit between placements, and between widths as said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from checkpoint.runs import MEMORY, STACK, TIGHT, offloaded, train
from checkpoint.test_resume import check


def make(moments: Any) -> Any:
    return lambda params: outcore.AdamW(params, lr=1e-2, weight_decay=0.1, moments=moments)


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_run_goes_on_to_the_bit(moments: str, tmp_path: Path) -> None:
    check(STACK, make(moments), "bf16", TIGHT, [MEMORY], tmp_path)


def test_moments_in_fp32_are_rounded_when_loaded_into_fewer_bits(tmp_path: Path) -> None:
    with offloaded(STACK, make("fp32"), **MEMORY.settings(tmp_path)) as (model, optimizer):
        train(model, optimizer, STACK, range(2))
        exact = optimizer.state_dict()["state"]
        outcore.save(tmp_path / "saved", model, optimizer)
    with offloaded(STACK, make("8bit"), **TIGHT.settings(tmp_path)) as (model, optimizer):
        outcore.load(tmp_path / "saved", model, optimizer)
        found = optimizer.state_dict()["state"]
        outcore.save(tmp_path / "narrow", model, optimizer)
    for index, state in exact.items():
        first, second = found[index]["exp_avg"], found[index]["exp_avg_sq"]
        large = state["exp_avg"].abs() > state["exp_avg"].abs().max() * 2**-10
        assert torch.allclose(first[large], state["exp_avg"][large], rtol=2**-4)
        assert torch.allclose(second, state["exp_avg_sq"], rtol=2**-3, atol=1e-12)
    with offloaded(STACK, make("fp32"), **MEMORY.settings(tmp_path)) as (model, optimizer):
        outcore.load(tmp_path / "narrow", model, optimizer)
        for index, state in optimizer.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"], found[index]["exp_avg"])
