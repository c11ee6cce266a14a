"""A run that was saved and loaded elsewhere goes on to the bit as one that never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outcore
from checkpoint.runs import (
    DROPOUT,
    MEMORY,
    MIDDLE,
    STACK,
    TIGHT,
    Where,
    adamw,
    offloaded,
    seed_all,
    train,
    weights,
)
from exact.families import FAMILIES
from exact.shapes import SHAPES, Shape

pytestmark = pytest.mark.filterwarnings("ignore:step skipped")

STEPS, CUT = 4, 2


def check(
    shape: Shape,
    make: Callable[[Any], outcore.Optimizer],
    precision: str,
    here: Where,
    there: list[Where],
    folder: Path,
) -> None:
    """Train and save at a cut; from there continue under each of the other placements."""
    seed_all(11)
    with offloaded(shape, make, precision, **here.settings(folder)) as (model, optimizer):
        train(model, optimizer, shape, range(CUT))
        state = optimizer.state_dict()
        outcore.save(folder / "saved", model, optimizer, extra={"step": CUT})
        expected = train(model, optimizer, shape, range(CUT, STEPS))
        expected.weights = weights(model)
        moments = optimizer.state_dict()
    for where in there:
        seed_all(99)
        with offloaded(shape, make, precision, seed=8, **where.settings(folder)) as (model, optimizer):
            assert outcore.load(folder / "saved", model, optimizer) == {"step": CUT}
            assert_same(optimizer.state_dict(), state)
            found = train(model, optimizer, shape, range(CUT, STEPS))
            found.weights = weights(model)
            found.assert_equal(expected)
            assert_same(optimizer.state_dict(), moments)


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit, types included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)
def test_shapes(shape: Shape, tmp_path: Path) -> None:
    check(shape, adamw, "bf16", TIGHT, [MEMORY, MIDDLE, TIGHT], tmp_path)


OPTIMIZERS: dict[str, Callable[[Any], outcore.Optimizer]] = {
    "AdamW": adamw,
    "SGD": lambda params: outcore.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "plain SGD": lambda params: outcore.SGD(params, lr=1e-2),
    "Lion": lambda params: outcore.Lion(params, lr=1e-3, weight_decay=0.1),
    "Adagrad": lambda params: outcore.Adagrad(params, initial_accumulator_value=0.1),
    "NAdam": lambda params: outcore.Foreign(torch.optim.NAdam, params),
    "Adafactor": lambda params: outcore.Foreign(torch.optim.Adafactor, params),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, precision: str, tmp_path: Path) -> None:
    check(STACK, OPTIMIZERS[name], precision, MEMORY, [TIGHT], tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_masters_and_moments_load_in_any_precision(precision: str, tmp_path: Path) -> None:
    with offloaded(STACK, precision="bf16") as (model, optimizer):
        train(model, optimizer, STACK, range(2))
        outcore.save(tmp_path / "saved", model, optimizer)
        expected, moments = weights(model), optimizer.state_dict()
    with offloaded(STACK, precision=precision, seed=8) as (model, optimizer):
        outcore.load(tmp_path / "saved", model, optimizer)
        assert_same(weights(model), expected)
        assert_same(optimizer.state_dict(), moments)
        train(model, optimizer, STACK, range(1))


def test_the_saving_run_is_not_disturbed(tmp_path: Path) -> None:
    results = []
    for saves in (False, True):
        seed_all(3)
        with offloaded(DROPOUT, **TIGHT.settings(tmp_path)) as (model, optimizer):
            result = train(model, optimizer, DROPOUT, range(1))
            for step in range(1, 4):
                if saves:
                    outcore.save(tmp_path / f"{step}", model, optimizer)
                train(model, optimizer, DROPOUT, range(step, step + 1), result)
            result.weights = weights(model)
            results.append(result)
    results[0].assert_equal(results[1])


def test_groups_schedulers_and_generators(tmp_path: Path) -> None:
    """Hyperparameters by group, a scheduler through ``extra``, and all generators."""

    def make(params: Any) -> outcore.Optimizer:
        groups = [
            {"params": params[:3], "lr": 1e-3, "name": "first"},
            {"params": params[3:], "betas": (0.8, 0.9)},
        ]
        return outcore.AdamW(groups, lr=1e-2)

    def scheduled(optimizer: outcore.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5),
        ]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])

    def steps(model: Any, optimizer: Any, scheduler: Any, count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(count):
            train(model, optimizer, STACK, range(1))
            scheduler.step()
            found.append([group["lr"] for group in optimizer.param_groups])
        return [*found, torch.rand(2).tolist(), random.random(), np.random.rand()]

    seed_all(5)
    with offloaded(STACK, make) as (model, optimizer):
        scheduler = scheduled(optimizer)
        steps(model, optimizer, scheduler, 2)
        extra = {"scheduler": scheduler.state_dict(), "order": torch.arange(5), 3: float("inf"), "none": None}
        outcore.save(tmp_path / "saved", model, optimizer, extra=extra)
        expected = steps(model, optimizer, scheduler, 3)
    seed_all(6)
    with offloaded(STACK, make, seed=8) as (model, optimizer):
        scheduler = scheduled(optimizer)
        found = outcore.load(tmp_path / "saved", model, optimizer)
        assert_same(found, extra)
        scheduler.load_state_dict(found["scheduler"])
        assert optimizer.param_groups[0]["name"] == "first"
        assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)
        assert steps(model, optimizer, scheduler, 3) == expected


def test_loss_scale_and_skipped_steps(tmp_path: Path) -> None:
    with offloaded(STACK, precision="fp16") as (model, optimizer):
        assert optimizer.loss_scale is not None
        optimizer.loss_scale.value = 2.0**40
        with pytest.warns(RuntimeWarning, match="skipped"):
            train(model, optimizer, STACK, range(1))
        outcore.save(tmp_path / "saved", model, optimizer)
        scale = vars(optimizer.loss_scale).copy()
    with offloaded(STACK, precision="fp16") as (model, optimizer):
        outcore.load(tmp_path / "saved", model, optimizer)
        assert vars(optimizer.loss_scale) == scale
        assert optimizer.skipped_steps == 1


def test_weights_alone(tmp_path: Path) -> None:
    """Saved and loaded without an optimizer, and into a model that does not train."""
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(2))
        outcore.save(tmp_path / "whole", model, optimizer)
        outcore.save(tmp_path / "weights", model)
        expected = weights(model)
        loss = STACK.loss(model(**STACK.batch(0))).item()
    assert not list((tmp_path / "weights").glob("moments*"))
    for name in ("whole", "weights"):
        with offloaded(STACK, seed=8) as (model, _):
            outcore.load(tmp_path / name, model)
            assert_same(weights(model), expected)
        from exact.shapes import built

        model = outcore.offload(built(STACK, 8), budget=outcore.Budget(host="1GiB"))
        outcore.load(tmp_path / name, model)
        with torch.no_grad():
            assert STACK.loss(model(**STACK.batch(0))).item() == loss
        outcore.release(model)


def test_gradients_that_wait_are_dropped(tmp_path: Path) -> None:
    with offloaded(STACK) as (model, optimizer):
        outcore.save(tmp_path / "saved", model, optimizer)
        expected = train(model, optimizer, STACK, range(1))
        STACK.loss(model(**STACK.batch(5))).backward()
        optimizer.clip_grad_norm_(1e-3)
        outcore.load(tmp_path / "saved", model, optimizer)
        assert train(model, optimizer, STACK, range(1)).norms == expected.norms
