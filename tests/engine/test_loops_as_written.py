"""Loops and blocks as people write them: the same result as in memory, or an error that says why not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import outcore
from engine.twin import Run, assert_idle, floats, same, spread
from outcore.errors import ModelError, StateError

WIDTH = 48


class Block(nn.Module):
    """What it does beside its layer is up to a function of its input and its call."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("late", None)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.function(self, *args, **kwargs)


def python_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(block.up(x)) * random.random()


def numpy_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(block.up(x)) * float(np.random.rand())


def late_buffer(block: Any, x: torch.Tensor) -> torch.Tensor:
    seen = 1.0 if block.late is None else block.late
    block.late = 0.9 * torch.as_tensor(seen) + 0.1 * x.detach().abs().mean()
    return x + torch.tanh(block.up(x)) * seen


def debug(block: Any, x: torch.Tensor, debug: bool = False) -> torch.Tensor:
    return x + torch.tanh(block.up(x)) * (2.0 if debug else 1.0)


class Model(nn.Module):
    """Blocks of one kind, called in one way."""

    def __init__(
        self, function: Callable[..., torch.Tensor], call: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(Block(function) for _ in range(3))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


def plainly(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def training(run: Run) -> None:
    random.seed(5)
    np.random.seed(5)
    run.train(0, 1, 2)
    run.log += [random.random(), float(np.random.rand())]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (python_random, plainly),
        (numpy_random, plainly),
        (late_buffer, plainly),
        (debug, lambda block, x: block(x, debug=True)),
        (debug, lambda block, x: block(x=x, debug=True)),
    ],
    ids=["python", "numpy", "late buffer", "debug", "keywords"],
)
@pytest.mark.parametrize("rows", [None, 4], ids=["whole", "one slice"])
def test_recomputed_blocks(function: Any, call: Any, rows: int | None, tmp_path: Path) -> None:
    same(
        training,
        tmp_path,
        lambda: Model(function, call),
        precision="fp32",
        activations=outcore.Activations("recompute", rows),
    )


@pytest.mark.parametrize(
    "call",
    [lambda block, x: block(x=x), lambda block, x: block((x,)), lambda block, x: block({"x": x})],
    ids=["keyword", "tuple", "dict"],
)
def test_an_input_that_changes_before_it_is_recomputed_is_an_error(call: Any) -> None:
    def taking(block: Any, x: Any) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, tuple) else x
        return torch.tanh(block.up(x + 1.0))

    def changed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = call(block, x)
        x += y.detach()
        return y

    budget = outcore.Budget(host="64MiB")
    with (
        spread(
            lambda: Model(taking, changed), precision="fp32", budget=budget, activations="recompute"
        ) as run,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        run.backward(0)


class Filling(nn.Module):
    """Puts what it computes into a list of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, aux: list[torch.Tensor], more: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        aux.append(x)
        more["x"] = x
        return self.second(x)


def test_containers_that_are_given_to_be_filled_are_filled(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            aux: list[torch.Tensor] = []
            more: dict[str, torch.Tensor] = {}
            loss = run.model(run.cast(floats(step)), aux, more).square().mean()
            loss = loss + sum(h.square().mean() for h in aux) + more["x"].abs().mean()
            run.optimizer.backward(loss)
            run.log.append(loss.item())
            run.step()

    same(script, tmp_path, Filling, precision="fp32")


def roomy() -> Any:
    return spread(budget=outcore.Budget(host="64MiB"))


def test_a_gradient_after_clipping_is_refused() -> None:
    for clip in ("clip_grad_norm_", "clip_grad_value_"):
        with roomy() as run:
            run.backward(0)
            getattr(run.optimizer, clip)(1e-3)
            with pytest.raises(StateError, match="clip once a step, after its last backward"):
                run.backward(1)
            run.optimizer.zero_grad()
            run.train(2)
            assert_idle(run.engine)


def test_a_gradient_that_is_set_by_hand_is_refused() -> None:
    with roomy() as run:
        run.train(0)
        parameter = next(run.model.parameters())
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(StateError, match=r"\.grad was set by hand"):
            run.optimizer.step()
        parameter.grad = None
        run.train(1)


@pytest.mark.parametrize("how", ["assign", "fill", "init"])
def test_a_write_that_would_be_lost_is_refused(how: str) -> None:
    with roomy() as run:
        run.train(0)
        before = {name: value.clone() for name, value in outcore.weights(run.model)}
        parameter = next(p for p in run.model.parameters() if p.dim() == 2)
        if how == "assign":
            parameter.data = torch.zeros(parameter.shape)
        elif how == "fill":
            parameter.data.zero_()
        else:
            nn.init.ones_(parameter)

        def train() -> None:
            run.backward(1)
            run.optimizer.step()

        with pytest.raises(StateError, match=r"outcore.change\(model, function\)"):
            train()
        for name, value in outcore.weights(run.model):
            assert torch.equal(value, before[name]), name
        run.optimizer.zero_grad()
        run.train(2)
        assert_idle(run.engine)


def test_other_parameter_groups_are_refused() -> None:
    with roomy() as run:
        run.train(0)
        group = run.optimizer.param_groups[0]
        first = group["params"].pop(0)
        run.backward(1)
        with pytest.raises(StateError, match="the parameter groups hold other parameters"):
            run.optimizer.step()
        group["params"].append(first)
        with pytest.raises(StateError, match="or in another order"):
            run.optimizer.step()
        group["params"].insert(0, group["params"].pop())
        run.optimizer.step()


def test_backward_from_before_a_load_is_refused(tmp_path: Path) -> None:
    with roomy() as run:
        run.train(0)
        outcore.save(tmp_path / "saved", run.model, run.optimizer)
        loss = run.loss(1)
        outcore.load(tmp_path / "saved", run.model, run.optimizer)
        with pytest.raises(StateError, match="was changed since this forward"):
            run.optimizer.backward(loss)


def test_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ModelError, match=r"0\.weight and 1\.weight are two parameters in the same memory"):
        outcore.offload(model, outcore.AdamW(model.parameters()), budget=outcore.Budget(host="64MiB"))
