"""The same bits, however the work is cut, aligned, threaded or implemented."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim.kernel_cases import (
    CLIPPED,
    PLAIN,
    RULES,
    State,
    assert_same,
    combinations,
    values,
    without_numba,
)
from outcore.optim.kernels import GradTransform, Master, Workers
from outcore.optim.kernels.workers import GRAIN

__all__ = ["without_numba"]

N = 40_013  # beyond one fp16 block, no multiple of any vector
STEPS = 3


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with Workers(4) as workers:
        yield workers


def gradients(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [values(n, seed).to(dtype) for seed in range(1, STEPS + 1)]


def run(
    name: str, state: State, grads: list[Tensor], transform: GradTransform, workers: Workers | None
) -> dict[str, Tensor]:
    for step, grad in enumerate(grads, 1):
        state.step(name, grad, step, transform, workers)
    return state.read(RULES[name][0])


@pytest.mark.parametrize(("name", "dtype", "grad", "master"), combinations())
@pytest.mark.parametrize("transform", [PLAIN, CLIPPED], ids=["plain", "clipped"])
def test_torch_fallback_gives_the_same_bits(
    name: str,
    dtype: torch.dtype,
    grad: torch.dtype,
    master: Master,
    transform: GradTransform,
    request: pytest.FixtureRequest,
) -> None:
    rule, _ = RULES[name]
    grads = gradients(N, grad)
    fast = run(name, State.new(rule, values(N), dtype, master), grads, transform, None)
    request.getfixturevalue("without_numba")
    slow = run(name, State.new(rule, values(N), dtype, master), grads, transform, None)
    assert_same(fast, slow)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_number_of_threads_does_not_matter(name: str, dtype: torch.dtype, four: Workers) -> None:
    rule, _ = RULES[name]
    master = Master.NONE if dtype is torch.float32 else Master.FULL
    n = 2 * GRAIN + 77
    grads = gradients(n, dtype)[:1]
    with Workers(1) as one:
        alone = run(name, State.new(rule, values(n), dtype, master), grads, PLAIN, one)
    assert_same(alone, run(name, State.new(rule, values(n), dtype, master), grads, PLAIN, four))


@settings(max_examples=30, deadline=None)
@given(
    combination=st.sampled_from([tuple(case.values) for case in combinations()]),
    cuts=st.lists(st.integers(0, 300), max_size=5),
    offset=st.integers(0, 9),
)
def test_cuts_and_alignment_do_not_matter(
    combination: tuple[str, torch.dtype, torch.dtype, Master], cuts: list[int], offset: int
) -> None:
    name, dtype, grad, master = combination
    rule, _ = RULES[name]
    grads = gradients(300, grad)
    whole = run(name, State.new(rule, values(300), dtype, master), grads, CLIPPED, None)
    pieces = State.new(rule, values(300), dtype, master, offset)
    edges = [0, *sorted(cuts), 300]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        run(name, pieces.part(part), [g[part] for g in grads], CLIPPED, None)
    assert_same(whole, pieces.read(rule))


@pytest.mark.parametrize(("name", "dtype", "grad", "master"), combinations())
@pytest.mark.parametrize("n", [0, 1])
def test_empty_and_single(name: str, dtype: torch.dtype, grad: torch.dtype, master: Master, n: int) -> None:
    rule, _ = RULES[name]
    plain = torch.linspace(-1, 1, 5)
    grads = [plain[:n].to(grad)] * 2
    many = run(name, State.new(rule, plain, dtype, master), [plain.to(grad)] * 2, PLAIN, None)
    few = run(name, State.new(rule, plain[:n], dtype, master), grads, PLAIN, None)
    assert_same({key: value[:n] for key, value in many.items()}, few)


@pytest.mark.parametrize("name", RULES)
def test_nan_stays_in_its_element(name: str) -> None:
    rule, _ = RULES[name]
    clean, grad = torch.linspace(-1, 1, 67), torch.linspace(1, 2, 67)
    spoiled = grad.clone()
    spoiled[13] = float("nan")
    good = run(name, State.new(rule, clean, torch.float32, Master.NONE), [grad], CLIPPED, None)
    bad = run(name, State.new(rule, clean, torch.float32, Master.NONE), [spoiled], CLIPPED, None)
    for key, found in bad.items():
        assert found[13] == 0x7FC00000, f"{key} is no quiet NaN"
        others = torch.arange(67) != 13
        assert torch.equal(found[others], good[key][others])


def test_concurrent_calls_share_a_pool(four: Workers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rule, _ = RULES["adamw"]
    n = 2 * GRAIN + 5
    grads = gradients(n, torch.bfloat16)[:1]

    def once(_: int) -> dict[str, Tensor]:
        state = State.new(rule, values(n), torch.bfloat16, Master.SPLIT)
        return run("adamw", state, grads, PLAIN, four)

    with ThreadPoolExecutor(3) as callers:
        first, *others = callers.map(once, range(3))
    for other in others:
        assert_same(first, other)
