"""Blocks whose forward changes buffers give the same results where they are recomputed."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import outcore
from engine.twin import Run, floats, same, spread
from outcore.errors import ModelError
from outcore.model.slices.block import recompute_in_slices

WIDTH = 48


class Averages(nn.Module):
    """Batch norm, whose kernel changes running statistics and tells nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2)))


class Iterates(nn.Module):
    """Spectral norm: each forward reads what the one before left."""

    def __init__(self) -> None:
        super().__init__()
        self.up = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x))


class Replaces(nn.Module):
    """A new tensor takes a buffer's place, and scales what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + torch.tanh(self.up(x)) * self.scale
        self.scale = 0.9 * self.scale + 0.1 * y.detach().abs().mean((0, 1))
        return y


class Model(nn.Module):
    """Each block is called so many times in a forward."""

    def __init__(self, kind: type[nn.Module], blocks: int = 3, calls: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            for _ in range(self.calls):
                x = block(x)
        return x


def script(run: Run) -> None:
    for step in range(3):
        run.train(step)
        run.log += [buffer.double().sum().item() for buffer in run.model.buffers()]
    run.model.eval()
    with torch.no_grad():
        run.loss(9)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", [Averages, Iterates, Replaces])
def test_recomputing_leaves_no_trace(kind: type[nn.Module], calls: int, tmp_path: Path) -> None:
    same(
        script,
        tmp_path,
        lambda: Model(kind, calls=calls),
        precision="fp32",
        activations=outcore.Activations("recompute"),
    )


@pytest.mark.parametrize("kind", [Averages, Iterates, Replaces])
def test_a_batch_of_one_slice_leaves_no_trace_either(kind: type[nn.Module], tmp_path: Path) -> None:
    same(
        script,
        tmp_path,
        lambda: Model(kind),
        precision="fp32",
        activations=outcore.Activations("recompute", microbatch=3),
    )


@pytest.mark.parametrize("kind", [Iterates, Replaces])
def test_slices_go_on_from_each_other_as_micro_batches_do(kind: type[nn.Module]) -> None:
    torch.manual_seed(7)
    plain = kind()
    sliced = copy.deepcopy(plain)
    recompute_in_slices(sliced, "a block", 1)
    rows = torch.randn(3, 12, WIDTH)
    for row in rows.split(1):
        plain(row).square().sum().backward()
    sliced(rows).square().sum().backward()
    for one, other in zip(plain.parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(plain.buffers(), sliced.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.emulated
def test_recomputing_leaves_no_trace_on_a_device(emu: ModuleType) -> None:
    found = []
    for way in ("keep", "recompute"):
        budget = outcore.Budget(device="64MiB", host="64MiB")
        settings = dict(budget=budget, precision="fp32", activations=way, device=emu.NAME)
        with spread(lambda: Model(Averages), **settings) as run:
            for step in range(2):
                loss = run.model(floats(step).to(emu.NAME)).square().mean()
                run.optimizer.backward(loss)
                run.step()
                found.append([loss.item(), *(b.double().sum().item() for b in run.model.buffers())])
    assert found[:2] == found[2:]


class Remembers(nn.Module):
    """A large buffer that each forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("book", torch.zeros(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.book.add_(1)
        return x + self.up(x)


def test_a_large_buffer_that_changes_is_refused(tmp_path: Path) -> None:
    budget = outcore.Budget(host="64MiB", disk=tmp_path)
    with (
        spread(lambda: Model(Remembers), precision="fp32", budget=budget, activations="recompute") as run,
        pytest.raises(ModelError, match=r"blocks.0 changes its buffer book of 80,000 bytes"),
    ):
        run.backward(0)
    with spread(lambda: Model(Remembers), precision="fp32", budget=budget, activations="keep") as run:
        run.train(0)
        assert run.model.blocks[0].book[0] == 1
