"""rehearse: what a run needs is known before it, and what it needs is enough."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.families import FAMILIES
from outcore.errors import BudgetError, ModelError, UsageError
from outcore.integrations.shapes import shape
from outcore.offloaded import engine_of
from outcore.optim.kernels import AdamRule, SGDRule
from outcore.planning.outcome import Limits
from outcore.planning.rehearsal import rehearse
from outcore.trace.profile import Profile

LLAMA = FAMILIES[1]
ROWS = {name: torch.cat([value] * 16) for name, value in LLAMA.batch(0).items()}


def ids(batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty((batch, length), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def rehearsed(**settings: Any) -> Any:
    settings = {"batch": ROWS, "on_host": True, "chunk_size": "64KiB", **settings}
    return rehearse(LLAMA.build().train(), None, **settings)


@cache
def once(activations: outcore.Activations) -> Any:
    """The same for one of `WAYS`, which several tests look at."""
    return rehearsed(activations=activations)


def train(
    batch: Any,
    folder: Path,
    limits: Limits,
    activations: outcore.Activations,
    expected: Profile | None = None,
) -> None:
    torch.manual_seed(7)
    model = LLAMA.build().train()
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(host=limits.host, disk=f"{folder}:{limits.disk}" if limits.disk else None),
        activations=activations,
        chunk_size="64KiB",
    )
    if expected is not None:
        engine_of(model).gauge.expect(expected)
    try:
        for number in range(3):
            LLAMA.loss(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0 and expected is None:  # it may pass a budget by an allocation
                engine_of(model).ledger.reset_peaks()
        assert outcore.snapshot(model).peak["host"] <= limits.host
    finally:
        outcore.release(model)


WAYS = [
    outcore.Activations("keep"),
    outcore.Activations("recompute"),
    outcore.Activations("recompute", microbatch=2),
]


@pytest.mark.parametrize("activations", WAYS, ids=["keep", "recompute", "slices"])
def test_the_least_is_enough_with_a_little_more(activations: outcore.Activations, tmp_path: Path) -> None:
    found = once(activations)
    low = found.least
    train(ROWS, tmp_path, Limits(None, low.host * 115 // 100, 1 << 30), activations)
    with pytest.raises(BudgetError):
        train(ROWS, tmp_path, Limits(None, low.host * 85 // 100, 1 << 30), activations)


@pytest.mark.parametrize("activations", WAYS, ids=["keep", "recompute", "slices"])
def test_where_the_first_step_is_foreseen_the_least_is_enough_from_the_first(
    activations: outcore.Activations, tmp_path: Path
) -> None:
    found = once(activations)
    train(ROWS, tmp_path, Limits(None, found.least.host, 1 << 30), activations, found.activations)


@pytest.mark.parametrize("activations", WAYS, ids=["keep", "recompute", "slices"])
def test_the_whole_is_enough_without_a_disk(activations: outcore.Activations, tmp_path: Path) -> None:
    found = once(activations)
    enough = Limits(None, found.whole * 105 // 100, 0)
    found.check(enough)
    train(ROWS, tmp_path, enough, activations)
    with pytest.raises(BudgetError) as caught:
        found.check(Limits(None, found.whole - 1, 0))
    assert caught.value.tier == "host"
    assert caught.value.needed == found.whole


def test_slices_need_less_and_are_named() -> None:
    keep, whole, sliced = map(once, WAYS)
    assert sliced.least.host < whole.least.host < keep.least.host
    assert sliced.activations.peak < whole.activations.peak < keep.activations.peak
    limits = Limits(None, sliced.least.host, 1 << 30)
    with pytest.raises(
        BudgetError, match=r"smallest budgets.*slices of \d+ \(microbatch\); or use batches of"
    ):
        whole.check(limits)
    with pytest.raises(BudgetError, match="recompute activations"):
        keep.check(Limits(None, whole.least.host, 1 << 30))
    sliced.check(limits)


def test_a_loss_in_slices_needs_less() -> None:
    model = shape("gpt2").model
    whole, sliced = (
        rehearse(
            model, None, ids(2, 256), on_host=True, activations=outcore.Activations("recompute", None, part)
        )
        for part in (None, 64)
    )
    assert (
        sliced.activations.peak < 0.8 * whole.activations.peak
    )  # the gradient of the head is there as a whole
    assert sliced.least.host < whole.least.host


def test_many_slices_are_foreseen_from_a_few() -> None:
    """A trace of eight slices is put together from shorter ones; the peak is that of all eight, traced."""
    from outcore.planning import subject

    eight = {name: rows[:8] for name, rows in ROWS.items()}
    few = rehearsed(batch=eight, activations=outcore.Activations("recompute", microbatch=1))
    before, subject.SLICES = subject.SLICES, 100
    try:
        every = rehearsed(batch=eight, activations=outcore.Activations("recompute", microbatch=1))
    finally:
        subject.SLICES = before
    assert few.least.host == every.least.host
    assert few.whole == pytest.approx(every.whole, rel=0.02)
    assert few.activations.peak == every.activations.peak


def test_a_factory_and_a_rule_do() -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(LLAMA.build().train())
        return made[-1]

    adam = rehearse(make, AdamRule(decoupled=True), ROWS, on_host=True)
    assert all(p.is_meta for p in made[0].parameters())
    plain = rehearse(make, SGDRule(momentum=False), ROWS, on_host=True)
    assert plain.states < adam.states


def test_on_a_device_the_host_holds_chunks_alone() -> None:
    found = rehearsed(on_host=False)
    assert found.least.device > found.activations.peak
    assert found.least.host < rehearsed(on_host=True).least.host
    with pytest.raises(BudgetError) as caught:
        found.check(Limits(found.least.device - 1, 1 << 30, 1 << 30))
    assert caught.value.tier == "device"


def test_a_large_model_is_rehearsed_without_its_bytes() -> None:
    found = rehearse(shape("gpt2-1.3b").model, None, ids(4, 256), on_host=True)
    assert 14 * 1.3e9 < found.states < 15 * 1.4e9


def test_what_can_not_be_rehearsed_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a tensor"):
        rehearsed(batch={"x": 3})

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.BatchNorm1d(4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ModelError, match="mixes the samples"):
        rehearse(
            Mixing().train(),
            None,
            {"x": torch.empty(8, 4)},
            on_host=True,
            activations=outcore.Activations("recompute", microbatch=2),
        )
