"""What is done with parameters outside of forwards: a penalty, and what only asks how they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import outcore
from engine.twin import Run, assert_idle, floats, same, seeded, spread
from exact.shapes import Stack
from outcore.errors import ModelError, StateError

ROOMY = outcore.Budget(host="64MiB")


def absolute(model: nn.Module) -> torch.Tensor:
    return sum(p.abs().sum() for p in model.parameters())  # type: ignore[return-value]


def squares(model: nn.Module) -> torch.Tensor:
    return torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()


def vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).norm()


@pytest.mark.parametrize("penalty", [absolute, squares, vector])
@pytest.mark.parametrize("first", [True, False], ids=["before the forward", "after it"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_penalty_outside_of_the_model_is_refused(
    penalty: Callable[[nn.Module], torch.Tensor], first: bool, steps: int, tmp_path: Path
) -> None:
    with spread(budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run:
        run.train(*range(steps))
        before = {name: value.clone() for name, value in outcore.weights(run.model)}

        def train() -> None:
            if first:
                penalty(run.model)
            run.optimizer.backward(run.loss(steps) + penalty(run.model).float())

        with pytest.raises(ModelError, match=r"the parameter \S+\.\w+ was used outside .*weight_decay"):
            train()
        for name, value in outcore.weights(run.model):
            assert torch.equal(value, before[name]), name
        run.optimizer.zero_grad()
        run.train(steps)
        assert_idle(run.engine)  # type: ignore[arg-type]


def test_a_frozen_weight_that_is_used_outside_is_refused() -> None:
    def frozen() -> Stack:
        model = Stack(3)
        model.head.requires_grad_(False)
        return model

    with spread(frozen, precision="fp32", budget=ROOMY) as run:
        run.train(0)
        hidden = run.model(floats(1))
        with pytest.raises(ModelError, match=r"head\.weight was used outside"):
            hidden.sum() * run.model.head.weight


class Checkpointed(Stack):
    """A part of it checkpoints itself."""

    def __init__(self) -> None:
        super().__init__(3)
        self.shrink = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(checkpoint(self.shrink, x, use_reentrant=False))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A unit whose forward computes the penalty on its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)
        self.out.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.out(torch.tanh(self.inner(x)))
        return x, self.inner.weight.abs().sum() + self.out.bias.square().sum()


class Owning(nn.Module):
    """Has a layer beside that unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(32, 32), Own()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.own(self.first(x))  # type: ignore[no-any-return]


def test_a_penalty_in_a_forward_is_that_in_memory(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for seed in range(3):
            x, penalty = run.model(run.cast(floats(seed)))
            loss = x.square().mean() + 0.01 * penalty
            run.log.append(loss.item())
            run.optimizer.backward(loss)
            run.step()

    same(script, tmp_path, Owning, precision="fp32", units=["own"])


@pytest.mark.parametrize("penalty", [absolute, squares, vector])
@pytest.mark.parametrize("within", [True, False], ids=["backward within", "backward after"])
def test_a_penalty_in_gather_is_that_in_memory(
    penalty: Callable[[nn.Module], torch.Tensor], within: bool, tmp_path: Path
) -> None:
    def script(run: Run) -> None:
        for seed in range(3):
            gather = nullcontext() if run.engine is None else outcore.gather(run.model)
            loss = run.loss(seed)
            with gather:
                loss = loss + 0.01 * penalty(run.model)
                run.log.append(loss.item())
                if within:
                    run.optimizer.backward(loss)
            if not within:
                run.optimizer.backward(loss)
            run.log.append(run.optimizer.clip_grad_norm_(1.0).item())
            run.step()

    same(script, tmp_path, precision="fp32", tight="8MiB")


def test_parameters_given_to_a_functional_call(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for seed in range(3):
            own = dict(run.model.named_parameters())
            loss = torch.func.functional_call(run.model, own, run.cast(floats(seed))).square().mean()
            run.log.append(loss.item())
            run.optimizer.backward(loss)
            run.step()

    same(script, tmp_path, precision="fp32")


def test_checkpointed_parts(tmp_path: Path) -> None:
    same(lambda run: run.train(0, 1, 2), tmp_path, Checkpointed, precision="fp32")


def test_what_asks_how_parameters_are_is_answered() -> None:
    with spread(precision="fp32", budget=ROOMY) as run:
        run.train(0)
        weight = run.model.head.weight
        assert isinstance(weight, nn.Parameter)
        assert sum(p.numel() for p in run.model.parameters() if p.requires_grad) > 0
        assert floats(0).type_as(weight).requires_grad is False
        x = floats(0).requires_grad_()
        assert (x * 2.0).to(weight).grad_fn is not None
        assert torch.zeros_like(weight).sum() == 0.0
        run.model.to("cpu")
        run.model.requires_grad_(True)
        run.train(1)


def test_after_release_they_are_ordinary_again() -> None:
    with spread(precision="fp32", budget=ROOMY) as run:
        run.train(0)
        assert type(run.model.head.weight) is not nn.Parameter
    for parameter in run.model.parameters():
        assert type(parameter) is nn.Parameter
        assert "_outcore" not in vars(parameter)


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_a_closed_parameter_is_not_copied(copies: Callable[[nn.Parameter], object]) -> None:
    with spread(budget=ROOMY) as run:
        run.train(0)
        for one in (run.model, next(run.model.parameters())):
            with pytest.raises(StateError, match="can't be copied or pickled"):
                copies(one)  # type: ignore[arg-type]


def test_torch_func_works_in_gather_without_gradients_around_it() -> None:
    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return sum(value.pow(2).sum() for value in values.values())  # type: ignore[return-value]

        return torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})

    expected = gradients(seeded(lambda: Stack(3)))
    with spread(lambda: Stack(3), precision="fp32", budget=ROOMY) as run:
        with torch.no_grad(), outcore.gather(run.model):
            found = gradients(run.model)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name
