"""What users do with the optimizer of an offloaded model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import outcore
from engine.twin import Run, adamw, of_trained, same, spread
from outcore.errors import ModelError, NonFiniteError, StateError
from outcore.optim.pipeline import Pipeline


def test_step_without_gradients(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.step()
        run.train(0)
        run.step()
        run.step()
        run.train(1)

    same(script, tmp_path)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step(set_to_none: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            run.backward(80 + step)
            run.optimizer.clip_grad_norm_(1e-3)
            run.optimizer.zero_grad(set_to_none=set_to_none)
            if step == 1:
                run.optimizer.step()
            run.train(step)

    same(script, tmp_path)


def test_the_models_own_zero_grad_forgets_gradients(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            run.backward(80 + step)
            (run.model if run.engine is not None else run.optimizer).zero_grad()
            run.train(step)

    same(script, tmp_path)


def grouped(model: Any) -> outcore.AdamW:
    return outcore.AdamW(
        [
            {"params": model.head.parameters(), "lr": 3e-3, "weight_decay": 0.0},
            {"params": model.blocks.parameters(), "betas": (0.8, 0.9)},
            {"params": model.embed.parameters(), "lr": 2e-2, "eps": 1e-5},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_groups_and_schedulers(name: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        scheduler = SCHEDULERS[name](run.optimizer)
        for step in range(5):
            run.train(step)
            scheduler.step()
            run.log.append([group["lr"] for group in run.optimizer.param_groups])

    same(script, tmp_path, make=grouped)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("order", ["norm value", "value norm", "norm norm", "value value norm norm"])
def test_clipping_twice(order: str, precision: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            run.backward(step)
            for k, way in enumerate(order.split()):
                if way == "norm":
                    run.log.append(run.optimizer.clip_grad_norm_(0.05 / (1 + k)).item())
                else:
                    run.optimizer.clip_grad_value_(1e-4 / (1 + k))
            run.step()

    same(script, tmp_path, precision=precision, tight="4MiB")


def test_a_second_norm_after_values(tmp_path: Path) -> None:
    """It is the norm of what the first left, also where that clipped."""

    def script(run: Run) -> None:
        for step in range(3):
            run.backward(step)
            run.optimizer.clip_grad_value_(1.0)
            for most in (1e-2, 1e-3, 1.0):
                run.log.append(run.optimizer.clip_grad_norm_(most).item())
            assert run.log[-1] == pytest.approx(1e-3, rel=1e-2)
            run.step()

    same(script, tmp_path, tight="4MiB")


def test_a_refused_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step can be tried again, with its clip and its count."""

    def trained(refuse: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        optimizer = outcore.AdamW(model.parameters(), lr=0.1)
        outcore.offload(model, optimizer, device="cpu", budget=outcore.Budget(host="64MiB"))
        for _ in range(2):
            optimizer.backward(1e3 * model(torch.ones(4, 8)).square().mean())
            optimizer.clip_grad_norm_(1e-3)
            if refuse:
                with monkeypatch.context() as patch:
                    patch.setattr(Pipeline, "begin", _refused)
                    with pytest.raises(StateError, match="planned"):
                        optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: value.clone() for name, value in outcore.weights(model)}
        found["steps"] = torch.tensor([entry["step"] for entry in optimizer.state_dict()["state"].values()])
        outcore.release(model)
        return found

    once, again = trained(False), trained(True)
    assert all(torch.equal(value, again[name]) for name, value in once.items())


def _refused(*given: Any) -> None:
    raise StateError("planned")


def test_fp16_overflow(tmp_path: Path) -> None:
    """An overflowing step changes nothing but the scale, says so, and later steps are those of a plain loop."""

    def script(run: Run) -> None:
        scale = run.optimizer.loss_scale
        assert scale is not None
        scale.value = 2.0**24
        for step in range(6):
            run.backward(step)
            run.log.append(str(run.optimizer.clip_grad_norm_(1.0)))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                run.step()
            run.log.append(
                (
                    scale.value,
                    run.optimizer.skipped_steps,
                    [re.sub(", first in [^(]*", " ", str(w.message)) for w in said],
                )
            )
        assert 0 < run.optimizer.skipped_steps < 6
        first = next(entry for entry in run.log if isinstance(entry, tuple))
        assert first[0] == 2.0**23
        assert "the loss scale is now" in first[2][0]

    same(script, tmp_path, precision="fp16")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [False, True])
def test_a_gradient_that_is_not_finite(clip: bool, value: float, precision: str, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        handle = run.model.blocks[1].register_forward_hook(
            lambda module, args, output: output.register_hook(lambda grad: grad * value) and None
        )
        run.backward(1)
        handle.remove()
        if clip:
            with pytest.raises(NonFiniteError):
                run.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            assert not run.optimizer.clip_grad_norm_(1.0).isfinite()
        with pytest.warns(RuntimeWarning, match="step skipped"):
            run.optimizer.step()
        run.log.append(run.optimizer.skipped_steps)
        run.train(2)

    same(script, tmp_path, precision=precision, tight="4MiB")


def test_a_closure(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):

            def closure(step: int = step) -> float:
                run.optimizer.zero_grad()
                loss = run.loss(step)
                loss.backward()
                return loss.item()

            run.log.append(run.optimizer.step(closure))

    same(script, tmp_path)


def test_foreign_parameters_are_refused(tmp_path: Path) -> None:
    stranger = nn.Parameter(torch.ones(3, 5))
    with (
        pytest.raises(ModelError, match=r"\[3, 5\]"),
        spread(make=lambda model: adamw([*model.parameters(), stranger])),
    ):
        pass


def test_an_optimizer_that_stepped_is_refused_and_the_model_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = adamw(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateError, match="first step"):
        outcore.offload(model, optimizer, budget=outcore.Budget(host="64MiB"))
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
    assert model(torch.ones(1, 8)).isfinite().all()


def test_an_optimizer_of_two_models_is_refused_and_the_second_stays(tmp_path: Path) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = adamw([*first.parameters()])
    outcore.offload(first, optimizer, budget=outcore.Budget(host="64MiB"))
    try:
        with pytest.raises((StateError, ModelError)):
            outcore.offload(second, optimizer, budget=outcore.Budget(host="64MiB"))
        assert second(torch.ones(1, 8)).isfinite().all()
    finally:
        outcore.release(first)


def test_a_parameter_that_is_frozen_later(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        run.model.blocks[0].requires_grad_(False)
        run.train(1, 2)
        run.model.blocks[0].requires_grad_(True)
        run.train(3)

    same(script, tmp_path)


def test_a_parameter_that_is_thawed_later_is_refused() -> None:
    """It has neither a place for its gradient nor states; training on without it would be silent."""

    def make(model: Any) -> outcore.AdamW:
        model.embed.requires_grad_(False)
        return adamw(model.parameters())

    with spread(make=make, budget=outcore.Budget(host="256MiB")) as run:
        run.train(0)
        run.model.embed.requires_grad_(True)
        with pytest.raises(StateError, match="embed"):
            run.train(1)


def test_the_state_of_an_optimizer_cannot_be_loaded_silently() -> None:
    with spread(budget=outcore.Budget(host="256MiB")) as run:
        run.train(0)
        state = run.optimizer.state_dict()
        run.train(1)
        with pytest.raises(StateError, match="load"):
            run.optimizer.load_state_dict(state)


def test_a_step_in_the_middle_of_accumulation(tmp_path: Path) -> None:
    """Gradients of one, three and two backwards; a parameter without any in between."""

    def script(run: Run) -> None:
        for step, count in enumerate((1, 3, 2)):
            for micro in range(count):
                run.backward(10 * step + micro)
            run.log.append(run.optimizer.clip_grad_norm_(0.1).item())
            run.step()
        x = run.cast(torch.ones(2, 32))
        run.model.embed(x).float().sum().backward()
        run.step()
        run.train(1)

    same(script, tmp_path, make=lambda model: adamw(of_trained(model)))
