"""Parameters of one element: read and written between steps as in memory, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from engine.twin import Run, assert_idle, floats, same, seeded, spread
from exact.reference import InMemory
from outcore.errors import StateError

ROOMY = outcore.Budget(host="64MiB")


class Scaled(nn.Module):
    """What CLIP, gates and heads of one output have: several parameters of one element, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.PReLU()) for _ in range(3))
        self.blocks[2][2].weight = self.blocks[0][2].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gate = nn.Parameter(torch.full((1, 1), 0.75))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale.exp() * self.gate + self.fixed


def write(run: Run, name: str, function: Callable[[torch.Tensor], Any]) -> None:
    """Write to what a parameter shows, and what that stands for in memory."""
    parameter = run.model.get_parameter(name)
    if run.engine is not None:
        function(parameter.data)
        return
    backend = run.optimizer._local
    assert isinstance(backend, InMemory)
    shown = parameter.detach().clone()
    function(shown)
    if not torch.equal(shown, parameter.detach()):
        backend.set_weight(parameter, shown.float())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_are_read_and_writes_are_kept(precision: str, tmp_path: Path) -> None:
    names = ["scale", "gate", "fixed", "head.bias", "blocks.0.2.weight", "blocks.2.2.weight"]

    def read(run: Run) -> None:
        with torch.no_grad():
            run.log += [run.model.get_parameter(name).item() for name in names]

    def script(run: Run) -> None:
        read(run)
        for seed in range(4):
            run.train(seed)
            write(run, "scale", lambda value, seed=seed: value.clamp_(max=1.49 - 0.01 * seed))
            read(run)
        write(run, "blocks.2.2.weight", lambda value: value.fill_(0.125))
        write(run, "gate", lambda value: value.mul_(2.0))
        write(run, "fixed", lambda value: value.zero_())
        run.backward(5)
        write(run, "head.bias", lambda value: value.add_(0.5))  # after backward, and the step comes on top
        write(run, "scale", lambda value: value.copy_(torch.tensor(1.0)))
        run.step()
        read(run)
        run.train(6)
        write(run, "scale", lambda value: value.sub_(0.25))  # seen by who reads the weights next

    same(script, tmp_path, Scaled, precision=precision, tight="400KiB")


def test_what_writes_to_the_parameter_itself(tmp_path: Path) -> None:
    with spread(Scaled, precision="fp32", budget=ROOMY) as run:
        run.train(0)
        nn.init.constant_(run.model.scale, 0.25)
        with torch.no_grad():
            run.model.gate.clamp_(max=0.5)
        outcore.save(tmp_path / "saved", run.model, run.optimizer)
        assert run.model.scale.item() == 0.25
        assert dict(outcore.weights(run.model))["gate"].item() == 0.5
        run.train(1, 2)
        assert run.model.scale.item() != 0.25
        run.model.scale.data.fill_(7.0)
        outcore.load(tmp_path / "saved", run.model, run.optimizer)
        assert (run.model.scale.item(), run.model.gate.item()) == (0.25, 0.5)
        run.model.scale.data.fill_(3.0)
        seen = []
        outcore.change(run.model, lambda name, value: seen.append((name, value.clone())))
        assert dict(seen)["scale"].item() == 3.0
        run.model.gate.data.fill_(2.0)
        outcore.export(run.model, tmp_path / "exported", dtype="fp32")
        with outcore.gather(run.model):
            assert (run.model.scale.item(), run.model.gate.item()) == (3.0, 2.0)
        assert_idle(run.engine)  # type: ignore[arg-type]
        values = outcore.snapshot(run.model).held
    assert values["host"] > 0
    assert type(run.model.scale) is nn.Parameter
    assert run.model.scale.isnan()


def test_an_alias_from_before_a_step_is_refused() -> None:
    with spread(Scaled, precision="fp32", budget=ROOMY) as run:
        run.train(0)
        alias = run.model.scale.data
        run.train(1)
        value = dict(outcore.weights(run.model))["scale"].item()
        alias.clamp_(max=0.1)
        with pytest.raises(StateError, match=r"scale was written to .* outcore.change\(model, function\)"):
            run.loss(2)
        assert run.model.scale.item() == value
        run.train(2)
        assert_idle(run.engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["scale", "blocks.1.2.weight"])
def test_a_write_between_forward_and_backward_is_refused(name: str, activations: str) -> None:
    with spread(Scaled, precision="fp32", budget=ROOMY, activations=activations) as run:
        loss = run.loss(0)
        run.model.get_parameter(name).data.fill_(0.5)
        with pytest.raises(StateError, match="was changed since this forward"):
            run.optimizer.backward(loss)
        assert run.model.get_parameter(name).item() == 0.5
        run.optimizer.zero_grad()
        run.train(1)


def test_what_does_not_look_at_values_reads_nothing() -> None:
    with spread(Scaled, precision="fp32", budget=ROOMY) as run:
        run.train(0)
        scale = run.model.scale
        assert (scale.shape, scale.dtype, scale.requires_grad) == ((), torch.float32, True)
        assert scale.grad is None
        assert torch.zeros(3).type_as(scale).sum() == 0.0
        run.model.to("cpu")
        assert run.engine is not None
        assert run.engine.singles._shown == {}


def test_a_model_that_does_not_train() -> None:
    model = seeded(Scaled)
    scale = model.scale.item()
    outcore.offload(model, budget=ROOMY, precision="fp32")
    try:
        assert model.scale.item() == scale
        before = model(floats(1)).detach()
        model.scale.data.sub_(1.0)
        with torch.no_grad():
            after = model(floats(1))
        assert not torch.equal(before, after)
        assert dict(outcore.weights(model))["scale"].item() == scale - 1.0
    finally:
        outcore.release(model)


@pytest.mark.emulated
def test_on_a_device(emu: ModuleType) -> None:
    logs = []
    for device in ("cpu", "emu"):
        budget = outcore.Budget(device="64MiB" if device == "emu" else None, host="64MiB")
        with spread(Scaled, precision="fp32", device=device, budget=budget) as run:
            run.train(0)
            run.model.scale.data.clamp_(max=1.25)
            found = [run.model.scale.item()]
            run.train(1)
            logs.append([*found, run.model.scale.item(), run.model.gate.item()])
    assert logs[0][0] == logs[1][0] == 1.25
    assert logs[0] == pytest.approx(logs[1], abs=1e-5)
