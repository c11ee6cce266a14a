"""What `offload` finds out about a batch before the first step: refusals, choices, and that it leaves no trace."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import outcore
from exact.families import FAMILIES
from outcore.errors import BudgetError
from outcore.offloaded import engine_of
from outcore.planning import prelude
from outcore.planning.rehearsal import rehearse
from outcore.trace.profile import Profile
from planning.accuracy import CPU

pytestmark = pytest.mark.rehearsed

LLAMA = next(shape for shape in FAMILIES if shape.name == "llama")
ROWS = {name: torch.cat([value] * 16) for name, value in LLAMA.batch(0).items()}
KEEP, RECOMPUTE = outcore.Activations("keep"), outcore.Activations("recompute")


class Blocks(nn.Module):
    """Blocks with dropout whose model counts its calls, and computes its loss or leaves it to the loop."""

    def __init__(self, loss: bool = True) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.register_buffer("scale", torch.ones(()))
        self.seen: list[Any] = []
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        self.seen.append(type(x).__name__)
        for block in self.inner:
            x = block(x) + self.scale * random.random()
        return {"loss": (x - y).float().square().mean()} if self.loss else x


class Asking(Blocks):
    """Looks into its values, in a way that no answer is right for."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        count = int((x > 0).sum().item()) or 1 // 0
        return super().forward(x * (count / count), y)


X, Y = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(256, 64)


def least(
    model: nn.Module, batch: dict[str, Any], activations: outcore.Activations, chunk: str = "64KiB"
) -> int:
    found = rehearse(model, None, batch, on_host=True, activations=activations, chunk_size=chunk)
    return found.least.host


def offloaded(model: nn.Module, host: int, folder: Path, **settings: Any) -> outcore.Optimizer:
    optimizer = outcore.AdamW(model.parameters())
    budget = outcore.Budget(host=host, disk=f"{folder}:1GiB")
    outcore.offload(model, optimizer, budget=budget, chunk_size="64KiB", **settings)
    return optimizer


def blocks(kind: type[Blocks] = Blocks, **settings: Any) -> Blocks:
    torch.manual_seed(3)
    random.seed(3)
    return kind(**settings).train()


def losses(model: Blocks, optimizer: outcore.Optimizer, steps: int = 3) -> list[float]:
    torch.manual_seed(5)
    random.seed(5)
    found = []
    for _ in range(steps):
        output = model(X, Y)
        loss = output["loss"] if isinstance(output, dict) else output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prelude.Rehearsing, "before", lambda *arguments: None)


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What runs were told to expect."""
    from outcore.engine import Engine

    found: list[Profile] = []
    original = Engine.expect
    monkeypatch.setattr(Engine, "expect", lambda self, p: (found.append(p), original(self, p))[1])
    return found


def test_a_budget_that_does_not_hold_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    model = blocks()
    offloaded(model, least(blocks(), {"x": X, "y": Y}, KEEP) * 9 // 10, tmp_path, activations=KEEP)
    for _ in range(2):  # not only once
        with pytest.raises(BudgetError, match="smallest budgets that would do for this batch"):
            model(X, Y)
    assert model.seen == []
    model(X[:8], Y[:8])["loss"].backward()  # a smaller one is another matter
    assert model.seen == ["Tensor"]
    outcore.release(model)


def test_the_least_is_enough_from_the_first_step_on(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = LLAMA.build().train()
    host = least(model, ROWS, RECOMPUTE)
    optimizer = offloaded(model, host, tmp_path, activations=RECOMPUTE)
    for _ in range(2):
        LLAMA.loss(model(**ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert outcore.snapshot(model).peak["host"] <= host
    outcore.release(model)


def test_blocks_recompute_where_nobody_said_what_they_should_do_and_they_must(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outcore")
    sizes = {way: least(blocks(), {"x": X, "y": Y}, way) for way in (KEEP, RECOMPUTE)}
    assert sizes[RECOMPUTE] < sizes[KEEP]
    model = blocks()
    optimizer = offloaded(model, sizes[RECOMPUTE], tmp_path)
    assert engine_of(model).activations == KEEP
    found = losses(model, optimizer)
    assert engine_of(model).activations == RECOMPUTE
    assert outcore.snapshot(model).peak["host"] <= sizes[RECOMPUTE]
    with pytest.raises(BudgetError):  # a larger one is looked at again, also in this copy's way
        model(torch.cat([X] * 4), torch.cat([Y] * 4))
    outcore.release(model)
    assert [r.message for r in caplog.records] == [
        "blocks recompute their activations: kept, they would not fit beside the states"
    ]
    roomy = blocks()
    assert found == losses(roomy, offloaded(roomy, 64 << 20, tmp_path, activations=KEEP))
    outcore.release(roomy)


def test_they_keep_them_where_that_fits(tmp_path: Path) -> None:
    model = blocks()
    losses(model, offloaded(model, least(model, {"x": X, "y": Y}, KEEP), tmp_path), 1)
    assert engine_of(model).activations == KEEP
    outcore.release(model)


@pytest.mark.parametrize("loss", [True, False])
def test_a_rehearsal_leaves_no_trace(tmp_path: Path, loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host = least(blocks(), {"x": X, "y": Y}, KEEP) * 2
    model = blocks(loss=loss)
    found = losses(model, offloaded(model, host, tmp_path, activations=KEEP))
    assert model.seen == ["Tensor"] * 3
    outcore.release(model)
    monkeypatch.setattr(prelude.Rehearsing, "before", lambda *arguments: None)
    plain = blocks(loss=loss)
    assert found == losses(plain, offloaded(plain, host, tmp_path, activations=KEEP))
    outcore.release(plain)


def test_what_a_loss_outside_of_the_model_takes_is_not_set_aside(
    tmp_path: Path, expected: list[Profile]
) -> None:
    for loss, count in ((False, 0), (True, 1)):
        model = blocks(loss=loss)
        losses(model, offloaded(model, 2 << 20, tmp_path, activations=KEEP), 2)
        assert len(expected) == count
        outcore.release(model)


def test_a_model_that_cannot_be_traced_is_measured_as_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, expected: list[Profile]
) -> None:
    caplog.set_level(logging.INFO, logger="outcore")
    model = blocks(Asking)
    optimizer = offloaded(model, 2 << 20, tmp_path)
    found = losses(model, optimizer)
    model(torch.cat([X, X]), torch.cat([Y, Y]))["loss"].backward()
    assert expected == []
    assert len(caplog.records) == 1
    assert "measured in the first one" in caplog.text
    outcore.release(model)
    plain = blocks()
    assert found == losses(plain, offloaded(plain, 2 << 20, tmp_path))
    outcore.release(plain)


def hooked(model: Blocks) -> list[str]:
    calls: list[str] = []
    model.inner[1].register_forward_hook(lambda module, args, output: calls.append(type(output).__name__))
    return calls


def replaced(model: Blocks) -> list[str]:
    calls: list[str] = []
    block = model.inner[1]
    original = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(type(x).__name__)
        return original(x)

    block.forward = forward
    return calls


def led_back(model: Blocks) -> list[str]:
    calls: list[str] = []
    block = model.inner[1]

    class Leading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = lambda x: block(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x)  # type: ignore[no-any-return]

    class Told(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(type(x).__name__)
            return super().forward(x)  # type: ignore[no-any-return]

    model.inner[1] = block = Told(*block)
    model.inner[0] = Leading()  # the first, so that a rehearsal comes to the block by it alone
    return calls


def uncopied(model: Blocks) -> list[str]:
    calls = hooked(model)
    model.inner[1]._forward_hooks.clear()
    model.open = (n for n in range(3))  # type: ignore[assignment]
    calls.append("Tensor")
    return calls


@pytest.mark.parametrize("change", [hooked, replaced, led_back, uncopied])
def test_what_is_not_ours_is_never_called_for_a_rehearsal(
    change: Any, tmp_path: Path, expected: list[Profile], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outcore")
    model = blocks()
    calls = change(model)
    losses(model, offloaded(model, 2 << 20, tmp_path, activations=KEEP), 1)
    assert set(calls) == {"Tensor"}
    assert expected == []
    assert len(caplog.records) == 1
    outcore.release(model)


def test_modes_and_hooks_of_the_users_see_nothing(tmp_path: Path, expected: list[Profile]) -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            type(self).count += 1
            return func(*args, **(kwargs or {}))

    packed = itertools.count()
    model = blocks()
    optimizer = offloaded(model, 2 << 20, tmp_path, activations=KEEP)
    with Counting():
        losses(model, optimizer, 1)
    assert Counting.count > 0
    larger = torch.cat([X, X]), torch.cat([Y, Y])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (next(packed), t)[1], lambda t: t):
        model(*larger)["loss"].backward()
    assert next(packed) > 0
    assert expected == []
    outcore.release(model)


def test_inputs_that_a_forward_changes_are_not_given_to_a_rehearsal(
    tmp_path: Path, expected: list[Profile]
) -> None:
    class Cache:
        def __init__(self) -> None:
            self.held: list[torch.Tensor] = []

    class Caching(Blocks):
        def forward(self, x: torch.Tensor, y: Any = None, cache: Any = None) -> Any:
            cache.held.append(x)
            return super().forward(x, y)

    model, cache = blocks(Caching), Cache()
    offloaded(model, 2 << 20, tmp_path, activations=KEEP)
    model(X, Y, cache)["loss"].backward()
    assert [type(t) for t in cache.held] == [torch.Tensor]
    assert expected == []
    outcore.release(model)


def test_neither_an_evaluation_nor_a_smaller_batch_is_rehearsed_nor_one_that_is_sure_to_fit(
    tmp_path: Path, expected: list[Profile]
) -> None:
    model = blocks()
    optimizer = offloaded(model, 2 << 20, tmp_path, activations=KEEP)
    with torch.no_grad():
        model(torch.cat([X, X]), torch.cat([Y, Y]))
    model.eval()
    model(X, Y)["loss"].backward()
    assert expected == []
    model.train()
    losses(model, optimizer, 2)
    model(X[:8], Y[:8])["loss"].backward()
    assert len(expected) == 1
    outcore.release(model)
    roomy = blocks()
    offloaded(roomy, 16 << 30, tmp_path)
    roomy(X[:8], Y[:8])["loss"].backward()
    assert len(expected) == 1
    outcore.release(roomy)


def test_a_plan_is_expected_and_its_batch_is_not_rehearsed_again(
    tmp_path: Path, expected: list[Profile]
) -> None:
    model = blocks()
    made = outcore.plan(
        model,
        batch={"x": X, "y": Y},
        machine=CPU,
        budget=outcore.Budget(host="2MiB", disk=f"{tmp_path}:1GiB"),
        chunk_size="64KiB",
        micro_batch=256,
    )
    assert made.profile is not None
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, plan=made)
    losses(model, optimizer, 1)
    assert expected == [made.profile]
    assert outcore.snapshot(model).peak["host"] <= 2 << 20
    outcore.release(model)
