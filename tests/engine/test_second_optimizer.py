"""A second optimizer over parameters of an offloaded model is refused; those of others are left alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import outcore
from engine.twin import floats, seeded, small, spread
from outcore.errors import StateError

ROOMY = outcore.Budget(host="64MiB")


def listeners() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: outcore.SGD(params, lr=0.1),
    ],
)
@pytest.mark.parametrize("early", [True, False], ids=["made before", "made after"])
def test_its_step_is_refused(make: Callable[[Any], torch.optim.Optimizer], early: bool) -> None:
    model = seeded(small)
    own = outcore.AdamW(model.parameters(), lr=1e-2)
    second = make(model.head.parameters()) if early else None
    outcore.offload(model, own, budget=ROOMY, precision="fp32")
    try:
        second = second or make(model.head.parameters())
        own.backward(model(floats(0)).square().mean())
        before = {name: value.clone() for name, value in outcore.weights(model)}
        with pytest.raises(StateError, match=r"holds head\.weight, which belongs to an offloaded model"):
            second.step()
        for name, value in outcore.weights(model):
            assert torch.equal(value, before[name]), name
        own.step()
        assert any(not torch.equal(value, before[name]) for name, value in outcore.weights(model))
    finally:
        outcore.release(model)


def test_of_a_model_that_was_offloaded_without_one() -> None:
    model = seeded(small)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    outcore.offload(model, budget=ROOMY)
    try:
        with pytest.raises(StateError, match="belongs to an offloaded model"):
            second.step()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        second.step()  # frozen ones it would leave alone anyway
    finally:
        outcore.release(model)


def test_others_go_on() -> None:
    other = nn.Linear(4, 4)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    foreign = lambda model: outcore.Foreign(torch.optim.Adamax, model.parameters(), lr=1e-2)  # noqa: E731
    with spread(budget=ROOMY) as first, spread(make=foreign, budget=ROOMY) as second:
        schedule = torch.optim.lr_scheduler.StepLR(first.optimizer, 1)
        for seed in range(2):
            other(torch.ones(1, 4)).sum().backward()
            theirs.step()
            first.train(seed)
            second.train(seed)
            schedule.step()
        assert torch.isfinite(other.weight).all()
        assert listeners() == 1


def test_nobody_listens_once_no_model_is_offloaded() -> None:
    gc.collect()
    before = listeners()
    with spread(budget=ROOMY):
        assert listeners() == 1
        with spread(budget=ROOMY):
            pass
        assert listeners() == 1
    assert listeners() == before == 0


def test_a_model_that_is_dropped_claims_nothing() -> None:
    model = seeded(small)
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, budget=ROOMY)
    kept = torch.optim.SGD([next(iter(model.parameters()))], lr=0.1)
    del model, optimizer
    gc.collect()
    kept.step()
    assert listeners() == 0
