"""An inf or NaN is traced to its unit also where gradients come down from a device one after the other."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore

pytestmark = pytest.mark.emulated


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * torch.inf


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return Spoil.apply(x) if self.spoils else x


def build(tmp_path: Path, bad: int | None = None) -> tuple[nn.Sequential, outcore.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    if bad is not None:
        with torch.no_grad():
            model[bad].linear.bias[3] = torch.nan
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3)
    budget = outcore.Budget(device="1MiB", host="2MiB", disk=tmp_path)
    outcore.offload(model, optimizer, budget=budget, device="emu")
    return model, optimizer


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_gradient_names_its_unit(emu: ModuleType, tmp_path: Path, block: int) -> None:
    model, optimizer = build(tmp_path)
    for spoils in (False, True):
        model[block].spoils = spoils
        model(torch.ones(2, 64, device="emu")).float().square().mean().backward()
    with pytest.warns(RuntimeWarning, match=rf"not finite, first in {block} "):
        optimizer.step()
    assert optimizer.nonfinite == str(block)
    outcore.release(model)


@pytest.mark.parametrize("block", [0, 3, 5])
def test_an_output_names_its_unit(emu: ModuleType, tmp_path: Path, block: int) -> None:
    model, _ = build(tmp_path, bad=block)
    assert outcore.first_nonfinite(model, torch.ones(2, 64, device="emu")) == str(block)
    outcore.release(model)
