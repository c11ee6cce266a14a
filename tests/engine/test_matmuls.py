"""Products in dtypes that the processor has no instructions for, widened to fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import outcore
from outcore.model import matmuls
from outcore.model.slices.loss import summed_cross_entropy

SLOW = (torch.bfloat16, torch.float16)


@pytest.fixture(params=SLOW, ids=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """As on a processor without instructions for either, with blocks that small matrices fill."""
    monkeypatch.setattr(matmuls, "slow_dtypes", lambda: SLOW)
    for name in ("_ROWS", "_COLUMNS", "_DEPTH"):
        monkeypatch.setattr(matmuls, name, 16)
    assert outcore.widen_matmuls()
    yield request.param
    outcore.widen_matmuls(False)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once from a sum in fp32: within half a unit of the last place, and what fp32 sums differ by."""
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * unit, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 16, 17), (33, 40, 7), (16, 50, 48)])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_products_are_rounded_once(dtype: torch.dtype, shape: tuple[int, int, int], turned: bool) -> None:
    rows, depth, columns = shape
    a = drawn(depth, rows, dtype=dtype).t() if turned else drawn(rows, depth, dtype=dtype)
    b = (
        drawn(columns, depth, dtype=dtype, seed=1).t()
        if turned
        else drawn(depth, columns, dtype=dtype, seed=1)
    )
    bias = drawn(columns, dtype=dtype, seed=2)
    exact = a.double() @ b.double()
    close(a @ b, exact)
    close(torch.addmm(bias, a, b, beta=0.5, alpha=2), 0.5 * bias.double() + 2 * exact)
    close(torch.addmm(torch.full_like(bias, torch.nan), a, b, beta=0), exact)


@pytest.mark.parametrize("size", [3, 24], ids=["together", "one by one"])
def test_batches_of_products(dtype: torch.dtype, size: int) -> None:
    a, b = drawn(5, size, 20, dtype=dtype), drawn(5, 20, size, dtype=dtype, seed=1)
    bias = drawn(1, size, size, dtype=dtype, seed=2)
    exact = a.double() @ b.double()
    close(torch.bmm(a, b), exact)
    close(torch.baddbmm(bias, a, b, alpha=2), bias.double() + 2 * exact)


def test_products_into_a_tensor_that_is_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = drawn(33, 40, dtype=dtype), drawn(40, 7, dtype=dtype, seed=1)
    bias, whole = drawn(7, dtype=dtype, seed=2), torch.zeros(50, 7, dtype=dtype)
    widened: list[torch.Tensor] = []
    multiply = matmuls._multiply

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        widened.append(args[2])
        return multiply(*args, **kwargs)

    monkeypatch.setattr(matmuls, "_multiply", counted)
    torch.mm(a, b, out=whole[10:43])
    assert torch.equal(whole[10:43], a @ b)
    assert not whole[:10].any()
    assert not whole[43:].any()
    assert torch.equal(torch.addmm(bias, a, b, out=torch.empty(33, 7, dtype=dtype)), torch.addmm(bias, a, b))
    batches = a.expand(3, 33, 40).contiguous(), b.expand(3, 40, 7).contiguous()
    out = torch.empty(3, 33, 7, dtype=dtype)
    assert torch.equal(torch.bmm(*batches, out=out), torch.bmm(*batches))
    assert torch.equal(torch.baddbmm(bias, *batches, out=out), torch.baddbmm(bias, *batches))
    assert len(widened) == 8
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(a, b, out=torch.empty(33, 7, dtype=torch.int32))


@pytest.mark.parametrize(
    "scales", [{}, {"beta": 0.5, "alpha": 2}, {"beta": 0}], ids=["plain", "scaled", "new"]
)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("batches", [0, 3], ids=["one", "several"])
def test_products_added_in_place(
    dtype: torch.dtype, batches: int, turned: bool, scales: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the form that makes a new tensor, in blocks of which each is read before it is written."""
    many = (batches,) if batches else ()
    a, b = drawn(*many, 33, 40, dtype=dtype), drawn(*many, 40, 20, dtype=dtype, seed=1)
    own = drawn(*many, *((20, 33) if turned else (33, 20)), dtype=dtype, seed=2)
    own = own.mT if turned else own
    if scales.get("beta") == 0:
        own.fill_(torch.nan)
    expected = torch.baddbmm(own, a, b, **scales) if batches else torch.addmm(own, a, b, **scales)
    widened: list[torch.Tensor] = []
    multiply = matmuls._multiply

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        widened.append(args[2])
        return multiply(*args, **kwargs)

    monkeypatch.setattr(matmuls, "_multiply", counted)
    found = own.baddbmm_(a, b, **scales) if batches else own.addmm_(a, b, **scales)
    assert found is own
    assert torch.equal(own, expected)
    assert len(widened) == 1


def test_a_product_added_to_a_row_of_where_it_goes(dtype: torch.dtype) -> None:
    """More rows than a block has: the row is written before the last of them is computed."""
    a, b = drawn(600, 40, dtype=dtype), drawn(40, 20, dtype=dtype, seed=1)
    out = drawn(600, 20, dtype=dtype, seed=2)
    expected = torch.addmm(out[0].clone(), a, b)
    assert torch.equal(torch.addmm(out[0], a, b, out=out), expected)


def test_a_product_added_to_an_operand_of_its_own(dtype: torch.dtype) -> None:
    own, other = drawn(33, 33, dtype=dtype), drawn(33, 33, dtype=dtype, seed=1)
    expected = torch.addmm(own, own, other), torch.addmm(own, other, own)
    assert torch.equal(own.clone().addmm_(own, other), expected[0])
    first, second = own.clone(), own.clone()
    assert torch.equal(first.addmm_(first, other), expected[0])
    assert torch.equal(second.addmm_(other, second), expected[1])


def test_what_can_not_be_added_in_place_is_refused_by_torch(dtype: torch.dtype) -> None:
    a, b = drawn(4, 5, dtype=dtype), drawn(5, 6, dtype=dtype, seed=1)
    with pytest.raises(RuntimeError, match="single memory location"):
        drawn(1, 6, dtype=dtype).expand(4, 6).addmm_(a, b)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.mm(a, b, out=drawn(1, 6, dtype=dtype).expand(4, 6))
    with pytest.raises(RuntimeError):
        drawn(6, dtype=dtype).addmm_(a, b)


def test_a_product_added_in_place_has_gradients(dtype: torch.dtype) -> None:
    def gradients(inplace: bool) -> list[torch.Tensor]:
        start, a, b = (drawn(20, 20, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
        own = start * 1
        made = own.addmm_(a, b) if inplace else torch.addmm(own, a, b)
        made.backward(drawn(20, 20, dtype=dtype, seed=3))
        return [tensor.grad for tensor in (start, a, b) if tensor.grad is not None]

    pairs = list(zip(gradients(True), gradients(False), strict=True))
    assert len(pairs) == 3
    assert all(torch.equal(one, other) for one, other in pairs)


class Products(TorchDispatchMode):
    """Notes the operators that multiply matrices, as they reach the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if "mm" in name:
            overload = func._overloadname
            self.seen.append(name if overload == "default" else f"{name}.{overload}")
        return func(*args, **(kwargs or {}))


def test_a_loss_in_slices_is_widened_as_a_whole(dtype: torch.dtype) -> None:
    """One product that is left to torch takes longer than all others."""
    hidden = drawn(12, 16, dtype=dtype).requires_grad_()
    weight = drawn(50, 16, dtype=dtype, seed=1).requires_grad_()
    with Products() as products:
        summed_cross_entropy(hidden, weight, None, torch.arange(12), -100, 4).backward()
    assert len(products.seen) >= 3
    assert set(products.seen) <= set(matmuls._KERNELS)


@pytest.mark.parametrize("masked", ["", "bool", "each row"])
def test_attention_and_its_gradients(dtype: torch.dtype, masked: str) -> None:
    q, k, v = (drawn(3, 2, 8, 4, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
    mask = None
    if masked:
        mask = torch.ones(3 if masked == "each row" else 1, 1, 8, 8, dtype=torch.bool).tril()
        if masked == "each row":
            mask = torch.where(mask, 0.0, -2.0).to(dtype)
    given = drawn(3, 2, 8, 4, dtype=dtype, seed=3)
    out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    out.backward(given)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    exact = functional.scaled_dot_product_attention(*wide, wide_mask, is_causal=mask is None)
    exact.backward(given.double())
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)
    for ours, theirs in zip((q, k, v), wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0.05, atol=0.02)


def test_attention_lies_in_memory_as_torch_lays_it(dtype: torch.dtype) -> None:
    """Models view what comes out without copying it, however the batch was split."""
    q = drawn(6, 8, 2, 32, dtype=dtype).transpose(1, 2)
    ours = functional.scaled_dot_product_attention(q, q, q)
    outcore.widen_matmuls(False)
    theirs = functional.scaled_dot_product_attention(q, q, q)
    assert ours.stride() == theirs.stride()
    assert ours.transpose(1, 2).view(6, 8, 64).shape == (6, 8, 64)


def test_other_dtypes_are_left_to_torch(dtype: torch.dtype) -> None:
    a, b, bias = (drawn(*shape, dtype=torch.float32) for shape in ((33, 40), (40, 20), (20,)))
    q = drawn(2, 2, 8, 4, dtype=torch.float32)
    ours = (a @ b, torch.addmm(bias, a, b), functional.scaled_dot_product_attention(q, q, q))
    outcore.widen_matmuls(False)
    theirs = (a @ b, torch.addmm(bias, a, b), functional.scaled_dot_product_attention(q, q, q))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_what_can_not_be_multiplied_is_refused_by_torch(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        drawn(2, 3, dtype=dtype) @ drawn(2, 3, dtype=dtype)
    a = drawn(2, 3, 3, dtype=dtype)
    for product, operands in ((torch.mm, (a, a)), (torch.bmm, (a[0], a[0])), (torch.mm, (a[0], a[0, 0]))):
        with pytest.raises(RuntimeError, match=r"must be|matrix|expected"):
            product(*operands)
    with pytest.raises(RuntimeError, match="same dtype"):
        drawn(2, 3, dtype=dtype) @ drawn(3, 2, dtype=torch.float32)
    assert (drawn(2, 0, dtype=dtype) @ drawn(0, 3, dtype=dtype)).tolist() == [[0.0] * 3] * 2


def test_it_can_be_taken_back(dtype: torch.dtype) -> None:
    a = drawn(40, 40, dtype=dtype)
    widened = a @ a
    assert outcore.widen_matmuls()
    assert matmuls.is_widening()
    assert torch.equal(a @ a, widened)
    assert not outcore.widen_matmuls(False)
    assert not matmuls.is_widening()
    torch.testing.assert_close(a @ a, widened)


def test_an_offload_says_what_would_be_slow(dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    precision = outcore.Precision(name)  # type: ignore[arg-type]
    outcore.widen_matmuls(False)
    with pytest.warns(UserWarning, match=r"no instructions for .*float16.*widen_matmuls"):
        model = outcore.offload(nn.Linear(4, 4), precision=precision)
    outcore.release(model)
    outcore.widen_matmuls()
    outcore.release(outcore.offload(nn.Linear(4, 4), precision=precision))


def test_the_environment_leaves_products_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_MATMULS", "torch")
    assert matmuls.slow_dtypes() == ()
    assert not outcore.widen_matmuls()
    monkeypatch.delenv("OUTCORE_MATMULS")
    assert set(matmuls.slow_dtypes()) <= set(SLOW)
