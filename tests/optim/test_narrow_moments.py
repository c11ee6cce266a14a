"""Moments in 16 and 8 bits: not exact, but the same bits everywhere, without drift, and kept by reading and writing."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import outcore
from optim.kernel_cases import CLIPPED, NARROW, PLAIN, State, assert_same, bits, values, without_numba
from outcore.errors import UsageError
from outcore.optim.kernels import AdamRule, Master, Workers, codec
from outcore.optim.kernels.workers import GRAIN

__all__ = ["without_numba"]

HOMES = [(torch.float32, Master.NONE), (torch.bfloat16, Master.SPLIT), (torch.bfloat16, Master.FULL)]
STEPS = 3


def run(
    name: str, state: State, n: int, transform: outcore.optim.kernels.GradTransform = PLAIN, **more: Workers
) -> dict[str, Tensor]:
    for step in range(1, STEPS + 1):
        state.step(name, values(n, step).to(state.param.dtype), step, transform, **more)
    return state.read(NARROW[name][0])


def new(name: str, n: int, dtype: torch.dtype = torch.bfloat16, master: Master = Master.SPLIT) -> State:
    return State.new(NARROW[name][0], values(n), dtype, master)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(("dtype", "master"), HOMES, ids=str)
def test_torch_fallback_gives_the_same_bits(
    name: str, dtype: torch.dtype, master: Master, request: pytest.FixtureRequest
) -> None:
    n = 40_013
    fast = run(name, new(name, n, dtype, master), n, CLIPPED)
    request.getfixturevalue("without_numba")
    assert_same(fast, run(name, new(name, n, dtype, master), n, CLIPPED))


@pytest.mark.parametrize("name", NARROW)
def test_threads_and_the_place_of_the_master_do_not_matter(name: str) -> None:
    n = GRAIN + 77
    split = run(name, new(name, n), n)
    with Workers(3) as three:
        assert_same(split, run(name, new(name, n, master=Master.FULL), n, workers=three))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(NARROW)), st.lists(st.integers(0, 9), max_size=4))
def test_cuts_do_not_matter(name: str, cuts: list[int]) -> None:
    n = 9 * 128 + 40
    whole, pieces = new(name, n), new(name, n)
    for step in range(1, STEPS + 1):
        grad = values(n, step).to(torch.bfloat16)
        whole.step(name, grad, step)
        for start, stop in itertools.pairwise([0, *sorted(cut * 128 for cut in cuts), n]):
            pieces.part(slice(start, stop)).step(name, grad[start:stop], step)
    rule = NARROW[name][0]
    assert_same(whole.read(rule), pieces.read(rule))


@pytest.mark.parametrize("name", NARROW)
def test_what_was_read_can_be_written_without_a_loss(name: str) -> None:
    n = 5_003
    rule, state, other = NARROW[name][0], new(name, n), new(name, n)
    run(name, state, n)
    master = torch.empty(n)
    rule.master(state.param, state.planes, master)
    rule.set_moments(other.planes, rule.moments(state.planes))
    rule.set_master(other.param, other.planes, master)
    for ours, theirs in zip(state.planes, other.planes, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize(("kept", "off"), [("bf16", 2**-7), ("8bit", 2**-3)])
def test_a_second_moment_shrinks_as_in_fp32(kept: str, off: float) -> None:
    """Where gradients stay away, within half a step: rounded to nearest it would stand still for ever."""
    rule, n = AdamRule(True, codec(kept)), 4096
    state = State.new(rule, torch.zeros(n), torch.float32, Master.NONE)
    hyper = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    generator = torch.Generator().manual_seed(1)
    rule.update(state.param, torch.randn(n, generator=generator), state.planes, hyper, 1, PLAIN)
    first = rule.moments(state.planes)["exp_avg_sq"].sum()
    for step in range(2, 1002):
        rule.update(state.param, torch.zeros(n), state.planes, hyper, step, PLAIN)
    left = rule.moments(state.planes)["exp_avg_sq"].sum() / first
    assert abs(left / 0.999**1000 - 1) < off


def test_eight_bits_are_within_half_a_step_where_the_window_reaches() -> None:
    """2^-4 of a first moment and 2^-3 of a second one; below, the first is zero and the second is not."""
    rule = AdamRule(True, codec("8bit"))
    state = State.new(rule, torch.zeros(128), torch.float32, Master.NONE)
    exact = torch.logspace(0, -12, 128, base=2.0) * torch.tensor([1.0, -1.0]).repeat(64)
    exact[-1] = 1e-12
    rule.set_moments(state.planes, {"exp_avg": exact, "exp_avg_sq": exact.abs()})
    found = rule.moments(state.planes)
    error = (found["exp_avg"] / exact - 1).abs()[:-1]
    assert error.max() <= 2**-4
    assert (found["exp_avg_sq"] / exact.abs() - 1).abs()[:-1].max() <= 2**-3
    assert found["exp_avg"][-1] == 0
    assert 0 < found["exp_avg_sq"][-1] < 1e-9


def test_bytes_per_parameter() -> None:
    def width(kept: str) -> float:
        planes = AdamRule(True, codec(kept)).planes(torch.bfloat16, Master.SPLIT)
        return sum(plane.nbytes(1 << 16) for plane in planes) / (1 << 16)

    assert [width(kept) for kept in ("fp32", "bf16", "8bit")] == [10, 6, 4 + 1 / 32]


def test_a_nan_stays_in_its_element() -> None:
    for name in NARROW:
        state = new(name, 300)
        grad = torch.ones(300, dtype=torch.bfloat16)
        grad[13] = float("nan")
        state.step(name, grad, 1)
        seen = state.read(NARROW[name][0])
        assert seen["master"][13] == 0x7FC00000
        assert seen["exp_avg_sq"][13] == bits(torch.tensor([float("nan")]))[0]


def test_what_can_not_be_kept_narrow_is_refused() -> None:
    with pytest.raises(UsageError, match="fp16"):
        AdamRule(True, codec("8bit")).planes(torch.float16, Master.FULL)
    with pytest.raises(UsageError, match="4bit"):
        outcore.AdamW([torch.zeros(1, requires_grad=True)], moments="4bit")  # type: ignore[arg-type]
