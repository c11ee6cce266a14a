"""Sums of squares, accumulation and widening."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.kernel_cases import CLIPPED, PLAIN, bits, values, without_numba
from outcore.chunks.layout import BLOCK
from outcore.errors import UsageError
from outcore.optim.kernels import (
    GradTransform,
    Workers,
    accumulate,
    add_mean,
    sum_of_squares,
    widen,
)
from outcore.optim.reduction import add_in_order

__all__ = ["without_numba"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
N = 5 * BLOCK + 12_345


def sums(
    grad: torch.Tensor, transform: GradTransform = PLAIN, workers: Workers | None = None
) -> torch.Tensor:
    out = torch.full((-(-grad.numel() // BLOCK),), 7.0, dtype=torch.float64)
    sum_of_squares(grad, out, transform, workers)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [PLAIN, CLIPPED], ids=["plain", "clipped"])
def test_sums_of_squares_are_right(dtype: torch.dtype, transform: GradTransform) -> None:
    grad = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = transform.apply(grad).double().square()
    expected = torch.stack([block.sum() for block in exact.split(BLOCK)])
    torch.testing.assert_close(sums(grad, transform), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_do_not_depend_on_threads_or_neighbours(dtype: torch.dtype) -> None:
    grad = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(dtype)
    with Workers(1) as one, Workers(3) as three:
        whole = sums(grad, workers=one)
        assert torch.equal(whole, sums(grad, workers=three))
    for k, block in enumerate(grad.split(BLOCK)):
        assert torch.equal(sums(block.clone()), whole[k : k + 1])


@pytest.mark.parametrize("n", [0, 1, 255, 257, BLOCK - 1, BLOCK, BLOCK + 1, N])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fallback_gives_the_same_sums(n: int, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    grad = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(dtype)
    fast = sums(grad, CLIPPED)
    request.getfixturevalue("without_numba")
    assert torch.equal(fast, sums(grad, CLIPPED))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, BLOCK, N - 1])
def test_what_is_not_finite_is_found(dtype: torch.dtype, bad: float, place: int) -> None:
    grad = torch.full((N,), torch.finfo(dtype).max, dtype=dtype)
    assert sums(grad).isfinite().all()
    grad[place] = bad
    found = sums(grad)
    assert math.isnan(found[place // BLOCK]) if math.isnan(bad) else math.isinf(found[place // BLOCK])
    assert int(found.isfinite().sum()) == found.numel() - 1


@settings(max_examples=20, deadline=None)
@given(n=st.integers(0, 70_000), dtype=st.sampled_from(DTYPES), offset=st.integers(0, 3))
def test_accumulation_is_float32_addition(n: int, dtype: torch.dtype, offset: int) -> None:
    first = values(n + offset, 1).to(dtype)[offset:]
    second = values(n + offset, 2).to(dtype)[offset:]
    total = torch.full((n + offset,), math.nan)[offset:]
    accumulate(total, first, first=True)
    assert torch.equal(total.nan_to_num(9.0), first.float().nan_to_num(9.0))
    accumulate(total, second)
    expected = first.float() + second.float()
    assert torch.equal(bits(total.nan_to_num(9.0)), bits(expected.nan_to_num(9.0)))


def test_fallback_accumulates_the_same(request: pytest.FixtureRequest) -> None:
    start, grad = values(N, 1), values(N, 2).to(torch.bfloat16)
    fast = start.clone()
    accumulate(fast, grad)
    request.getfixturevalue("without_numba")
    slow = start.clone()
    accumulate(slow, grad)
    assert torch.equal(bits(fast), bits(slow))


def test_widening_is_exact_for_every_bf16() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    out = torch.empty(every.numel())
    widen(every.view(torch.bfloat16), out)
    assert torch.equal(bits(out), every.int() << 16)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="block sums"):
        sum_of_squares(torch.ones(3), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(UsageError, match="block sums"):
        sum_of_squares(torch.ones(3), torch.zeros(1))
    with pytest.raises(UsageError, match="expected float32"):
        sums(torch.ones(3, dtype=torch.float64))
    with pytest.raises(UsageError, match="accumulated in float32"):
        accumulate(torch.ones(3).bfloat16(), torch.ones(3))
    with pytest.raises(UsageError, match="one length"):
        accumulate(torch.ones(3), torch.ones(4))


# -- means over ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_mean_in_one_pass_has_the_bits_of_several(
    ranks: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    n = BLOCK + 4321
    generator = torch.Generator().manual_seed(ranks)
    staged = torch.randn(ranks, n + 77, generator=generator).to(dtype)
    staged[0, 5], staged[-1, 6], staged[0, 7] = math.nan, math.inf, 0.0
    parts, before = staged[:, :n], torch.randn(n, generator=generator)
    before[7:9] = -0.0
    expected, mean = before.clone(), torch.empty(n)
    add_in_order(parts, mean)
    mean /= ranks
    accumulate(expected, mean)
    with Workers(3) as three:
        for workers in (None, three):
            found = before.clone()
            add_mean(found, parts, workers)
            assert torch.equal(bits(found), bits(expected))
    request.getfixturevalue("without_numba")
    found = before.clone()
    add_mean(found, parts)
    assert torch.equal(bits(found), bits(expected))


def test_means_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match=r"not torch\.float16"):
        add_mean(torch.zeros(3), torch.zeros(2, 3, dtype=torch.float16))
    with pytest.raises(UsageError, match="one length"):
        add_mean(torch.zeros(3), torch.zeros(2, 4))
