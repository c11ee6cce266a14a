"""The rules compute what `torch.optim` computes, and Lion what its paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from optim.kernel_cases import State
from outcore.errors import UsageError
from outcore.optim.kernels import (
    AdagradRule,
    AdamRule,
    GradTransform,
    LionRule,
    Master,
    Rule,
    SGDRule,
    adamw,
)

N, STEPS = 1_003, 20

CASES: list[tuple[Rule, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamRule(), torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}),
    (
        AdamRule(),
        torch.optim.AdamW,
        {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0, "maximize": True},
    ),
    (
        AdamRule(False),
        torch.optim.Adam,
        {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    ),
    (SGDRule(False), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGDRule(True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    (SGDRule(True), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (AdagradRule(), torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1}),
    (AdagradRule(0.5), torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-10, "initial_accumulator_value": 0.5}),
]


def close(ours: Tensor, theirs: Tensor) -> None:
    # sums that nearly cancel have few digits in any order of roundings, hence not rtol alone
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=5e-7)
    assert float((ours - theirs).norm() / theirs.norm()) <= 1e-6


def gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(N, generator=generator) for _ in range(STEPS)]


@pytest.mark.parametrize(("rule", "kind", "hyper"), CASES)
def test_agrees_with_torch(rule: Rule, kind: type[torch.optim.Optimizer], hyper: dict[str, Any]) -> None:
    start = torch.randn(N, generator=torch.Generator().manual_seed(4))
    theirs = torch.nn.Parameter(start.clone())
    optimizer = kind([theirs], foreach=False, **hyper)
    ours = State.new(rule, start, torch.float32, Master.NONE)
    for step, grad in enumerate(gradients(), 1):
        theirs.grad = grad.clone()
        optimizer.step()
        rule.update(ours.param, grad, ours.planes, hyper, step, GradTransform())
    close(ours.param, theirs.detach())
    for name, moment in rule.moments(ours.planes).items():
        close(moment, optimizer.state[theirs][name])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_the_paper_s(decay: float) -> None:
    lr, beta1, beta2 = 1e-2, 0.9, 0.99
    rule = LionRule()
    theirs = torch.randn(N, generator=torch.Generator().manual_seed(4))
    ours = State.new(rule, theirs, torch.float32, Master.NONE)
    momentum = torch.zeros(N)
    hyper = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay}
    for step, grad in enumerate(gradients(), 1):
        direction = (beta1 * momentum + (1 - beta1) * grad).sign()
        theirs = theirs - lr * (direction + decay * theirs)
        momentum = beta2 * momentum + (1 - beta2) * grad
        rule.update(ours.param, grad, ours.planes, hyper, step, GradTransform())
    close(ours.param, theirs)
    close(rule.moments(ours.planes)["exp_avg"], momentum)


@pytest.mark.parametrize("transform", [GradTransform(0.5), GradTransform(3.0, 0.5, 0.25)], ids=str)
def test_transform_is_applied_to_the_gradient(transform: GradTransform) -> None:
    rule = SGDRule(momentum=False)
    grad = gradients()[0]
    grad[:3] = torch.tensor([float("inf"), -float("inf"), 0.0])
    ours = State.new(rule, torch.zeros(N), torch.float32, Master.NONE)
    rule.update(ours.param, grad, ours.planes, {"lr": 1.0}, 1, transform)
    bound = transform.clamp
    expected = (grad * transform.pre_scale).clamp(-bound, bound) * transform.post_scale
    assert torch.equal(-ours.param, expected)
    assert torch.equal(transform.apply(grad), expected)
    assert bool(transform.apply(torch.tensor([float("nan")])).isnan().all())


def test_learning_rate_may_be_a_tensor() -> None:
    rule = SGDRule(momentum=False)
    state = State.new(rule, torch.ones(3), torch.float32, Master.NONE)
    rule.update(state.param, torch.ones(3), state.planes, {"lr": torch.tensor(0.5)}, 1, GradTransform())
    assert state.param.tolist() == [0.5] * 3


def test_parameters_that_require_gradients_are_taken() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    planes = (torch.zeros(4), torch.zeros(4))
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0}
    adamw(param, torch.ones(4), planes, step=1, **settings)
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.9))


ONES, PAIR = torch.ones(4), (torch.zeros(4), torch.zeros(4))


@pytest.mark.parametrize(
    ("param", "grad", "planes", "message"),
    [
        (torch.ones(4, 1), ONES, PAIR, "1-D contiguous CPU"),
        (torch.ones(8)[::2], ONES, PAIR, "1-D contiguous CPU"),
        (ONES, torch.ones(5), PAIR, "one length"),
        (ONES, ONES, PAIR[:1], "not 1 planes"),
        (ONES, ONES, (ONES, *PAIR), "can't have a master plane"),
        (ONES.bfloat16(), ONES, PAIR, "can't have no master plane"),
        (ONES.half(), ONES, (ONES.to(torch.int16), *PAIR), "can't have a master plane"),
        (ONES, ONES.double(), PAIR, "not torch.float64"),
        (ONES.double(), ONES, PAIR, "torch.float64 can't have no master plane"),
        (ONES, ONES, (ONES, ONES.bfloat16()), "moment plane must be float32"),
    ],
)
def test_tensors_that_do_not_fit(
    param: Tensor, grad: Tensor, planes: tuple[Tensor, ...], message: str
) -> None:
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 0.0, "weight_decay": 0.0}
    with pytest.raises(UsageError, match=message):
        adamw(param, grad, planes, step=1, **settings)


@pytest.mark.parametrize(
    ("rule", "hyper", "message"),
    [
        (AdamRule(), {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": True}, "amsgrad"),
        (AdamRule(), {"betas": (0.9, 0.99)}, "'lr' must be a number"),
        (LionRule(), {"betas": 0.9}, "'betas' must be two numbers"),
        (SGDRule(False), {"lr": 0.1, "momentum": 0.9}, "needs a momentum buffer"),
    ],
    ids=["amsgrad", "lr", "betas", "momentum"],
)
def test_hyperparameters_that_do_not_fit(rule: Rule, hyper: dict[str, Any], message: str) -> None:
    state = State.new(rule, torch.ones(3), torch.float32, Master.NONE)
    with pytest.raises(UsageError, match=message):
        rule.update(state.param, torch.ones(3), state.planes, hyper, 1, GradTransform())


def test_other_refusals() -> None:
    with pytest.raises(UsageError, match="negative"):
        AdagradRule(initial=-1.0)
    with pytest.raises(UsageError, match=r"not \['sum'\]"):
        AdamRule().set_moments(PAIR, {"sum": ONES})
