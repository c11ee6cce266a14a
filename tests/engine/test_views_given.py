"""Modules that give views of their parameters back, in containers of all kinds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

import outcore
from engine.twin import WIDTH, Run, same, spread
from exact.shapes import Stack


@dataclass
class Plain:
    token: torch.Tensor
    inner: Any = None


@dataclass(frozen=True)
class Frozen:
    token: torch.Tensor


@dataclass
class Output(ModelOutput):
    token: torch.Tensor | None = None


class Row(list):  # type: ignore[type-arg]
    """No plain list."""


KINDS: dict[str, Any] = {
    "dataclass": lambda t: Plain(t),
    "nested": lambda t: Plain(t, [OrderedDict(token=t)]),
    "frozen": lambda t: Frozen(t),
    "ordered": lambda t: OrderedDict(token=t),
    "output": lambda t: Output(token=t),
}


class Token(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.make = make

    def forward(self, rows: int) -> Any:
        return self.make(self.token.expand(rows, -1, -1))


class Given(Stack):
    def __init__(self, make: Any) -> None:
        super().__init__(3)
        self.token = Token(make)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        given = self.token(x.shape[0])
        y = super().hidden(x)
        if isinstance(given, Plain) and given.inner is not None:
            y = y + given.inner[0]["token"]
        return y + (given["token"] if isinstance(given, OrderedDict) else given.token)


@pytest.mark.parametrize("kind", KINDS)
def test_views_in_containers(kind: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(1, 2)

    same(script, tmp_path, lambda: Given(KINDS[kind]), precision="fp32")


def test_views_that_can_not_be_replaced(tmp_path: Path) -> None:
    budget = outcore.Budget(host="256MiB", disk=tmp_path)
    with (
        spread(lambda: Given(lambda t: Row([t])), precision="fp32", budget=budget) as run,
        pytest.raises(outcore.errors.ModelError, match=r"token gives a view of its parameters in a Row"),
    ):
        run.loss(1)
