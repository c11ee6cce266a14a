"""Gradients that enter a unit elsewhere than at the outputs of its calls, and bits that stay those of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outcore
from engine.twin import Run, same, spread
from exact.shapes import WIDTH, Block, Stack
from outcore.errors import StateError


class Balanced(Block):
    """Leaves a second loss on itself: before what it gives back is computed, and after."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.router(torch.tanh(self.norm(x))).float().square().mean()
        y = super().forward(x)
        self.aux = before + self.router(y).float().square().mean()
        return y


class Held:
    """Not a container that anybody looks into."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Objects(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Held(super().forward(x))


class Ways(Stack):
    """Blocks of a kind, called as that kind must be."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__(3)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            x = x.hidden if isinstance(x, Held) else x
        return x


def train(run: Run, whole: bool = True) -> None:
    for seed in range(3):
        loss = run.loss(seed) if whole else 0 * run.loss(seed).detach()
        for block in run.model.blocks:
            loss = loss + getattr(block, "aux", 0)
        run.optimizer.backward(loss)
        run.log.append(run.optimizer.clip_grad_norm_(1.0).item())
        run.step()


@pytest.mark.parametrize("way", ["keep", "recompute", "offload", "recompute+offload"])
@pytest.mark.parametrize("kind", [Balanced, Objects])
def test_tensors_that_leave_another_way(kind: type[Block], way: Any, tmp_path: Path) -> None:
    same(train, tmp_path, lambda: Ways(kind), precision="fp32", activations=outcore.Activations(way))


def test_frozen_parameters_on_the_other_way(tmp_path: Path) -> None:
    """Nothing in the graph leads to what is frozen, and it is read all the same."""

    def build() -> nn.Module:
        model = Ways(Balanced)
        for block in model.blocks:
            block.router.requires_grad_(False)
        return model

    same(train, tmp_path, build, precision="fp32")


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_nothing_but_the_other_way(way: Any, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        train(run, whole=False)

    same(script, tmp_path, lambda: Ways(Balanced), precision="fp32", activations=outcore.Activations(way))


def test_features_that_a_hook_collects(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        found: list[torch.Tensor] = []
        handles = [
            b.up.register_forward_hook(lambda m, a, output: found.append(output)) for b in run.model.blocks
        ]
        for seed in range(3):
            found.clear()
            run.loss(seed)
            run.optimizer.backward(sum(f.float().square().mean() for f in found))
            run.log.append(run.optimizer.clip_grad_norm_(1.0).item())
            run.step()
        for handle in handles:
            handle.remove()

    same(script, tmp_path, lambda: Ways(Block), precision="fp32")


def test_saved_tensors_that_change_are_found(tmp_path: Path) -> None:
    """As autograd would, which no longer sees them itself."""

    class Changes(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(super().forward(x))
            y.add_(1)
            return y

    budget = outcore.Budget(host="256MiB", disk=tmp_path)
    with (
        spread(lambda: Ways(Changes), precision="fp32", budget=budget) as run,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        run.backward(1)


class Transformed(Block):
    """Computes with torch.func, which wants no hooks for saved tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.1)
        slope = torch.func.grad(lambda z: F.gelu(z).sum())(x)
        return super().forward(x) + slope


def test_transforms_of_functions(tmp_path: Path) -> None:
    same(train, tmp_path, lambda: Ways(Transformed), precision="fp32")


def test_hooks_of_others_stay_in_charge(tmp_path: Path) -> None:
    packed: list[int] = []

    def script(run: Run) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.numel())
            return tensor.detach()

        for seed in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
                loss = run.loss(seed)
            run.optimizer.backward(loss)
            run.step()
        run.log.append(len(packed))
        packed.clear()

    same(script, tmp_path, lambda: Ways(Block), precision="fp32")


@pytest.mark.parametrize("way", ["keep", "recompute", "offload"])
def test_a_side_loss_from_before_a_step_is_refused(way: Any, tmp_path: Path) -> None:
    """Its nodes read parameters that the step changed, and no output leads to them."""
    budget = outcore.Budget(host="14MiB", disk=tmp_path)
    settings = dict(precision="fp32", budget=budget, activations=way)
    with spread(lambda: Ways(Balanced), **settings) as run:
        loss = run.loss(0)
        kept = run.model.blocks[1].aux
        run.optimizer.backward(loss)
        run.step()
        with pytest.raises(StateError, match="was changed since this forward"):
            run.optimizer.backward(kept)
        run.optimizer.zero_grad()
        train(run)


@pytest.mark.emulated
def test_on_a_device(emu: Any, tmp_path: Path) -> None:
    found = []
    for device, budget in (
        (None, outcore.Budget(host="256MiB")),
        (emu.NAME, outcore.Budget(device="4MiB", host="14MiB", disk=tmp_path)),
    ):
        torch.manual_seed(7)
        model = Ways(Balanced)
        optimizer = outcore.SGD(model.parameters(), lr=0.1)
        outcore.offload(
            model,
            optimizer,
            budget=budget,
            precision=outcore.Precision("fp32"),
            chunk_size="128KiB",
            device=device,
        )
        run = Run(model, optimizer, torch.float32, None)
        train(run)
        found.append((run.log, {name: value.clone() for name, value in outcore.weights(model)}))
        outcore.release(model)
        for block in model.blocks:
            block.aux = None  # its graph holds the device's tensors, and nobody collects what graphs hold
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
