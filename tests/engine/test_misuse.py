"""Calls that can't mean anything end in a clear error, and leave the model as it was."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import outcore
from engine.twin import Run, assert_idle, floats, same, seeded, small, spread
from exact.shapes import Stack
from outcore.errors import BudgetError, ModelError, OutcoreError, StateError, UsageError
from outcore.offloaded import engine_of

ROOMY = outcore.Budget(host="256MiB")


def test_offload_twice() -> None:
    with spread(budget=ROOMY) as run:
        with pytest.raises(StateError, match="offloaded already"):
            outcore.offload(run.model, budget=ROOMY)
        run.train(0)


def test_offload_of_a_part_of_an_offloaded_model() -> None:
    """Its parameters have no values there to start from."""
    with spread(budget=ROOMY) as run:
        for part in (run.model.blocks, nn.Sequential(run.model.embed, nn.Linear(160, 2))):
            with pytest.raises(StateError, match="offloaded already"):
                outcore.offload(part, budget=ROOMY)
        run.train(0)


def test_forward_after_release() -> None:
    model = seeded(small)
    outcore.offload(model, budget=ROOMY)
    outcore.release(model)
    with pytest.raises(StateError, match="released"):
        model(floats(1).bfloat16())


def test_a_released_model_is_offloaded_again_with_weights_alone(tmp_path: Path) -> None:
    model = seeded(small)
    save_file(
        {name: p.detach().clone() for name, p in model.named_parameters()}, tmp_path / "model.safetensors"
    )
    outcore.offload(model, budget=ROOMY)
    with torch.no_grad():
        before = model(floats(1))
    outcore.release(model)
    with pytest.raises(StateError, match="released"):
        outcore.offload(model, budget=ROOMY)
    outcore.offload(model, budget=ROOMY, weights=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(floats(1)), before)
    outcore.release(model)


def test_policies_are_named_in_words_and_wrong_words_are_refused() -> None:
    model = seeded(small)
    with pytest.raises(UsageError, match="unknown precision 'half'"):
        outcore.offload(model, budget=ROOMY, precision="half")
    with pytest.raises(UsageError, match="drop"):
        outcore.offload(model, budget=ROOMY, activations="drop")
    outcore.offload(model, budget=ROOMY, precision="fp32", activations="recompute")
    engine = engine_of(model)
    assert engine.precision == outcore.Precision("fp32")
    assert engine.activations == outcore.Activations("recompute")
    outcore.release(model)


def test_a_gradient_that_nobody_takes_is_said_once() -> None:
    """Of a parameter of another optimizer, or where `offload` got none."""
    model = seeded(small)
    torch.nn.init.zeros_(model.head.bias)
    optimizer = outcore.AdamW([p for name, p in model.named_parameters() if "blocks" in name])
    outcore.offload(model, optimizer, budget=ROOMY)
    loss = model(floats(0)).float().square().mean()
    with pytest.warns(RuntimeWarning, match="has a gradient that nobody takes"):
        optimizer.backward(loss)
    optimizer.step()
    optimizer.backward(model(floats(1)).float().square().mean())  # a second one would be an error
    outcore.release(model)


def test_backward_after_release() -> None:
    model = seeded(small)
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, budget=ROOMY)
    loss = model(floats(1)).float().square().mean()
    outcore.release(model)
    with pytest.raises(StateError, match="released"):
        loss.backward()


READS: dict[str, Callable[[Run], Any]] = {
    "state_dict": lambda run: run.model.state_dict(),
    "state_dict of a part": lambda run: run.model.blocks[0].state_dict(),
    "deepcopy": lambda run: copy.deepcopy(run.model),
    "deepcopy of a part": lambda run: copy.deepcopy(run.model.blocks[0]),
    "save": lambda run: torch.save(run.model, io.BytesIO()),
    "load_state_dict": lambda run: run.model.load_state_dict(small().state_dict()),
    "load_state_dict, assign": lambda run: run.model.load_state_dict(small().state_dict(), assign=True),
    "load_state_dict of a part": lambda run: run.model.head.load_state_dict(small().head.state_dict()),
}


@pytest.mark.parametrize("name", READS)
def test_values_are_not_taken_from_or_given_to_closed_parameters(name: str) -> None:
    with spread(budget=ROOMY) as run:
        run.train(0)
        with pytest.raises(StateError, match="offloaded"):
            READS[name](run)
        run.train(1)


def test_use_after_release() -> None:
    model = seeded(small)
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, budget=ROOMY)
    run = Run(model, optimizer, torch.bfloat16, None)
    run.train(0)
    outcore.release(model)
    outcore.release(model)
    for call in (outcore.snapshot, lambda m: list(outcore.weights(m))):
        with pytest.raises(StateError, match="not offloaded"):
            call(model)
    with pytest.raises(StateError), outcore.gather(model):
        pass


class Outside(Stack):
    """The root uses a parameter of a unit that it does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(x), self.head.weight)


class Stolen(Stack):
    """The root reads a closed parameter in a roundabout way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x) * self.blocks[0].norm.weight.detach()[None].t().t()


@pytest.mark.parametrize("kind", [Outside, Stolen])
@pytest.mark.parametrize("evaluation", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_parameter_used_outside_of_its_module(kind: type[Stack], evaluation: Any, tmp_path: Path) -> None:
    with spread(lambda: kind(3), budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run:
        with evaluation(), pytest.raises(ModelError, match=r"weight was used outside.*units="):
            run.loss(0)
        assert run.engine is not None
        assert_idle(run.engine)


@pytest.mark.parametrize("names", [["block"], ["blocks.7"], ["embed", "tail*"], [""]])
def test_units_that_do_not_exist(names: list[str]) -> None:
    with pytest.raises(ModelError, match="no module"), spread(units=names, budget=ROOMY):
        pass


def test_a_list_that_nobody_calls_is_no_unit() -> None:
    with pytest.raises(ModelError, match="ModuleList"), spread(units=["blocks"], budget=ROOMY):
        pass


def test_units_within_each_other() -> None:
    with pytest.raises(ModelError, match="within each other"), spread(units=["blocks.0", "blocks.0.up"]):
        pass


@pytest.mark.parametrize("names", [["blocks.*"], ["*.up", "*.down"], ["embed", "head", "blocks.[01]"]])
def test_named_units(names: list[str], tmp_path: Path) -> None:
    same(lambda run: run.train(0, 1), tmp_path, units=names, tight="4MiB")


@pytest.mark.parametrize(
    "settings",
    [{"chunk_size": 0}, {"chunk_size": -5}, {"chunk_size": "much"}, {"chunk_size": 1}, {"device": "nowhere"}],
)
def test_settings_without_a_meaning_leave_the_model_alone(settings: dict[str, Any]) -> None:
    model = seeded(small)
    with pytest.raises(OutcoreError):
        outcore.offload(model, budget=ROOMY, **settings)
    assert model(floats(0)).isfinite().all()


def test_a_budget_that_is_too_small_leaves_the_model_alone(tmp_path: Path) -> None:
    model = seeded(small)
    optimizer = outcore.AdamW(model.parameters())
    with pytest.raises(BudgetError):
        outcore.offload(model, optimizer, budget=outcore.Budget(host="100KiB", disk=tmp_path))
    assert model(floats(0)).isfinite().all()
    outcore.offload(model, optimizer, budget=ROOMY)
    outcore.release(model)


def test_torchs_own_optimizer_is_refused() -> None:
    model = seeded(small)
    with pytest.raises(UsageError, match=r"outcore\.Foreign\(torch\.optim\.AdamW"):
        outcore.offload(model, torch.optim.AdamW(model.parameters()), budget=ROOMY)
    assert model(floats(0)).isfinite().all()


def test_a_model_without_parameters() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        outcore.offload(nn.Sequential(nn.ReLU()), budget=ROOMY)


def test_backward_without_the_scale_of_fp16(tmp_path: Path) -> None:
    """The first gradient is refused, and training goes on as if nothing had been."""

    def script(run: Run) -> None:
        for step in range(2):
            if run.engine is not None:
                loss = run.model(run.cast(floats(70 + step))).float().square().mean()
                with pytest.raises(StateError, match="call optimizer"):
                    loss.backward()
                assert run.engine.present() == set()
                run.optimizer.zero_grad()
            run.train(step)

    same(script, tmp_path, precision="fp16", tight="4MiB")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x.to(torch.cfloat) @ self.turn).real.to(x.dtype))  # type: ignore[no-any-return]


def test_a_complex_parameter_is_refused_by_name() -> None:
    model = Complex()
    before = model.turn.detach().clone()
    optimizer = outcore.AdamW(model.parameters())
    with pytest.raises(ModelError, match=r"turn is complex \(torch.complex64\)"):
        outcore.offload(model, optimizer, budget=ROOMY)
    assert torch.equal(model.turn, before)
    assert not model._forward_hooks
    optimizer.check_free()


def test_a_complex_parameter_that_is_not_trained() -> None:
    model = Complex()
    x = torch.randn(3, 8)
    expected = model(x).detach()
    outcore.offload(model, budget=ROOMY, precision=outcore.Precision("fp32"))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    outcore.release(model)


@pytest.mark.parametrize("trains", [False, True])
def test_a_lazy_module_is_refused_by_name(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    optimizer = outcore.AdamW(model[0].parameters()) if trains else None
    with pytest.raises(ModelError, match=r"1\.weight has no shape"):
        outcore.offload(model, optimizer, budget=ROOMY)
    model(torch.randn(2, 8))
