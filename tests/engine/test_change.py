"""Parameters that are changed between two steps, and writes that would be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from engine.twin import Run, adamw, assert_idle, floats, of_trained, same, small, spread
from exact.reference import InMemory
from outcore.errors import StateError, UsageError

Change = Callable[[str, torch.Tensor], torch.Tensor | None]


def change(run: Run, function: Change) -> None:
    """`outcore.change`, and what it stands for in memory."""
    if run.engine is not None:
        outcore.change(run.model, function)
        return
    backend = run.optimizer._local
    assert isinstance(backend, InMemory)
    for name, parameter in run.model.named_parameters():
        value = backend.weight(parameter).clone()
        found = function(name, value)
        backend.set_weight(parameter, value if found is None else found)


def clamped(name: str, value: torch.Tensor) -> torch.Tensor:
    return value.clamp_(-0.05, 0.05)


def grown(name: str, value: torch.Tensor) -> None:
    value.mul_(1.0 + 2.0**-12)  # less than bf16 can tell


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_masters_change_and_moments_stay(precision: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(1, 2)
        change(run, clamped)
        run.train(3)
        for _ in range(8):
            change(run, grown)
        run.train(4, 5)
        run.backward(6)
        change(run, lambda name, value: value + 0.01)  # gradients that are there stay
        run.step()
        run.train(7)

    same(script, tmp_path, precision=precision)


def test_before_the_first_step(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        change(run, lambda name, value: torch.full_like(value, 0.01) if value.dim() > 1 else None)
        run.train(1, 2)

    same(script, tmp_path)


def test_changes_that_change_nothing_keep_every_bit(tmp_path: Path) -> None:
    with spread(budget=outcore.Budget(host="64MiB", disk=tmp_path)) as run:
        run.train(1, 2)
        before = {name: value.clone() for name, value in outcore.weights(run.model)}
        outcore.change(run.model, lambda name, value: None)
        for name, value in outcore.weights(run.model):
            assert torch.equal(value, before[name]), name


def test_a_model_that_does_not_train() -> None:
    torch.manual_seed(7)
    model = small()
    outcore.offload(model, budget=outcore.Budget(host="64MiB"), chunk_size="128KiB")
    try:
        outcore.change(model, lambda name, value: value.zero_())
        with torch.no_grad():
            found = model(floats(1))
        assert all(not value.any() for _, value in outcore.weights(model))
        assert not found.isnan().any()
    finally:
        outcore.release(model)


@pytest.mark.emulated
def test_on_a_device_that_has_the_old_values(emu: ModuleType) -> None:
    weights = []
    for device in ("cpu", "emu"):
        with spread(
            precision="fp32",
            device=device,
            budget=outcore.Budget(device="64MiB" if device == "emu" else None, host="64MiB"),
        ) as run:
            run.train(1)
            outcore.change(run.model, clamped)
            run.train(2)
            weights.append(dict(outcore.weights(run.model)))
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], atol=1e-5), name
        assert value.abs().max() < 0.08, name


@pytest.mark.parametrize(
    ("found", "said"),
    [(torch.zeros(2, 2), r"can't be changed to \[2, 2\]"), (3.0, "can't be changed to float")],
)
def test_other_shapes_are_refused(found: Any, said: str) -> None:
    with spread(budget=outcore.Budget(host="64MiB")) as run:
        before = {name: value.clone() for name, value in outcore.weights(run.model)}
        with pytest.raises(UsageError, match=said):
            outcore.change(run.model, lambda name, value: found)
        for name, value in outcore.weights(run.model):
            assert torch.equal(value, before[name]), name
        run.train(1)
        assert_idle(run.engine)  # type: ignore[arg-type]


def test_what_a_function_did_before_it_raised_stays() -> None:
    with spread(budget=outcore.Budget(host="64MiB")) as run:
        run.train(1)
        before = {name: value.clone() for name, value in outcore.weights(run.model)}
        names = list(before)

        def fails(name: str, value: torch.Tensor) -> None:
            if name == names[2]:
                raise ZeroDivisionError
            value.zero_()

        with pytest.raises(ZeroDivisionError):
            outcore.change(run.model, fails)
        for name, value in outcore.weights(run.model):
            assert torch.equal(value, torch.zeros_like(value) if name in names[:2] else before[name]), name
        run.train(2)
        assert run.engine is not None
        assert_idle(run.engine)


def test_not_while_the_model_is_in_use() -> None:
    with spread(budget=outcore.Budget(host="64MiB")) as run:
        with (
            outcore.gather(run.model),
            pytest.raises(StateError, match="within a forward, a backward or"),
        ):
            outcore.change(run.model, grown)
        loss = run.loss(1)
        outcore.change(run.model, grown)
        with pytest.raises(StateError, match="was changed since this forward"):
            run.optimizer.backward(loss)
        run.train(2)


class Writing(nn.Module):
    """Clamps its own weight when it is called, as long as it is told to."""

    writes = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.scale.clamp_(0.0, 0.5)
        return self.scale * self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_write_within_a_forward_is_refused(precision: str, tmp_path: Path) -> None:
    with spread(Writing, precision=precision, budget=outcore.Budget(host="64MiB", disk=tmp_path)) as run:
        with pytest.raises(
            StateError, match=r"scale was changed in place .* outcore.change\(model, function\)"
        ):
            run.loss(1)
        run.model.writes = False
        run.train(1, 2)
        assert_idle(run.engine)  # type: ignore[arg-type]


def test_an_embedding_that_renormalises_itself_is_refused() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(16, 32, max_norm=0.1), nn.Linear(32, 4))
    outcore.offload(model, adamw(of_trained(model)), budget=outcore.Budget(host="64MiB"))
    try:
        with pytest.raises(StateError, match=r"0\.weight was changed in place"):
            model(torch.arange(8))
    finally:
        outcore.release(model)


def test_a_write_within_gather_is_refused_and_all_is_closed() -> None:
    with spread(budget=outcore.Budget(host="64MiB")) as run:
        with (
            pytest.raises(StateError, match="was changed in place"),
            outcore.gather(run.model),
            torch.no_grad(),
        ):
            next(iter(run.model.parameters())).zero_()
        assert_idle(run.engine)  # type: ignore[arg-type]
