"""A value that is inf or NaN is traced to the first unit in which it appeared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import NonFiniteError

PLACES = pytest.mark.parametrize("disk", [False, True])


class Spoil(torch.autograd.Function):
    """Gives its input on, and in backward a gradient of a chosen value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.clone().fill_(ctx.value), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.spoiled: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.norm(self.linear(x)))
        return x if self.spoiled is None else Spoil.apply(x, self.spoiled)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@contextmanager
def offloaded(folder: Path, disk: bool, bad: str | None = None) -> Iterator[tuple[Model, outcore.Optimizer]]:
    torch.manual_seed(0)
    model = Model()
    if bad is not None:
        with torch.no_grad():
            model.get_parameter(bad).view(-1)[-1] = torch.inf
    optimizer = outcore.AdamW(model.parameters(), lr=1e-2)
    budget = outcore.Budget(host="1MiB", disk=folder) if disk else outcore.Budget(host="64MiB")
    outcore.offload(model, optimizer, budget=budget, chunk_size="4KiB")
    try:
        yield model, optimizer
    finally:
        outcore.release(model)


def loss_of(model: Model) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 32).view(4, 8)).float().square().mean()


@PLACES
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_gradient_names_the_unit_in_which_backward_met_it(
    tmp_path: Path, disk: bool, value: float, block: int
) -> None:
    with offloaded(tmp_path, disk) as (model, optimizer):
        for micro in range(2):
            model.blocks[block].spoiled = value if micro else None
            loss_of(model).backward()
        with pytest.raises(NonFiniteError, match=rf"first in blocks\.{block}$"):
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        with pytest.warns(
            RuntimeWarning, match=rf"not finite, first in blocks\.{block} \(1 skipped so far\)"
        ):
            optimizer.step()
        assert optimizer.nonfinite == f"blocks.{block}"
        model.blocks[block].spoiled = None
        loss_of(model).backward()
        optimizer.step()
        assert optimizer.nonfinite is None


def test_before_offload_the_parameter_is_named() -> None:
    model = Model()
    optimizer = outcore.SGD(model.parameters(), lr=1e-2)
    model.blocks[3].spoiled = torch.nan
    loss_of(model).backward()
    last = len(list(model.parameters())) - 3
    with pytest.warns(RuntimeWarning, match=rf"not finite, first in parameter {last} "):
        optimizer.step()


@PLACES
@pytest.mark.parametrize(
    ("bad", "unit"), [("embed.bias", "embed"), ("blocks.2.linear.weight", "blocks.2"), ("head.bias", "head")]
)
def test_a_loss_names_the_unit_whose_output_had_it_first(
    tmp_path: Path, disk: bool, bad: str, unit: str
) -> None:
    with offloaded(tmp_path, disk, bad) as (model, _):
        assert outcore.first_nonfinite(model, torch.ones(4, 8)) == unit


def test_what_is_finite_names_nothing_and_looking_changes_nothing(tmp_path: Path) -> None:
    found = []
    for looks in (False, True):
        with offloaded(tmp_path, True) as (model, optimizer):
            torch.manual_seed(3)
            losses = []
            for _ in range(3):
                loss = loss_of(model)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if looks:
                    assert outcore.first_nonfinite(model, torch.ones(4, 8)) is None
                losses.append(loss.item())
            found.append((losses, {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
    assert torch.equal(found[0][2], found[1][2])


def test_a_model_that_is_not_offloaded_is_refused() -> None:
    with pytest.raises(outcore.errors.StateError, match="not offloaded"):
        outcore.first_nonfinite(Model(), torch.ones(4, 8))
