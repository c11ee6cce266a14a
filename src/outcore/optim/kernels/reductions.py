"""What gradients go through before the update: sums of squares, accumulation, widening."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outcore.chunks.layout import BLOCK
from outcore.errors import UsageError
from outcore.optim.kernels import choice, half
from outcore.optim.kernels.launch import array, check, check_float
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers, workers

NEUTRAL = GradTransform()


def sum_of_squares(
    grad: Tensor,
    out_blocks: Tensor,
    transform: GradTransform = NEUTRAL,
    workers: Workers | None = None,
) -> None:
    """One sum of squares for each block of `BLOCK` consecutive elements.

    A square of an fp32 number is exact in fp64, and a block's squares are added in a fixed order, so a sum
    depends on the values of its block alone. It is finite if and only if they are.

    Args:
        grad: shape [n], fp32, bf16 or fp16.
        out_blocks: fp64, shape [ceil(n / BLOCK)]; written.
        transform: applied to each element first, in fp32.
        workers: threads to use; the common ones if not given.

    Raises:
        UsageError: a shape or dtype that does not fit.
    """
    n = check(grad)
    check_float(grad)
    blocks = check(out_blocks)
    if out_blocks.dtype is not torch.float64 or blocks != -(-n // BLOCK):
        raise UsageError(
            f"{n} elements have {-(-n // BLOCK)} float64 block sums, not {blocks} of {out_blocks.dtype}"
        )
    if n == 0:
        return
    values, sums = array(grad), array(out_blocks)
    scalars = transform.scalars()
    inner = values if values.dtype != np.float16 else np.empty(0, np.float32)
    kernel = choice.kernel("sum_of_squares", (inner, sums), (BLOCK, *scalars))

    def piece(first: int, last: int) -> None:
        part = values[first * BLOCK : last * BLOCK]
        if values.dtype != np.float16:
            kernel(part, sums[first:last], BLOCK, *scalars)
            return
        for b in range(first, last):
            wide = half.widened(values[b * BLOCK : (b + 1) * BLOCK])
            kernel(wide, sums[b : b + 1], BLOCK, *scalars)

    _pool(workers).run(piece, blocks, grain=4)


def accumulate(total: Tensor, grad: Tensor, first: bool = False, workers: Workers | None = None) -> None:
    """``total += float32(grad)``, or ``total = float32(grad)`` for the first of several.

    Args:
        total: fp32, shape [n]; written.
        grad: shape [n], fp32, bf16 or fp16.
        first: ignore what ``total`` holds.
        workers: threads to use; the common ones if not given.

    Raises:
        UsageError: a shape or dtype that does not fit.
    """
    n = check(total, grad)
    check_float(grad)
    if total.dtype is not torch.float32:
        raise UsageError(f"gradients are accumulated in float32, not in {total.dtype}")
    if n == 0:
        return
    sums, values = array(total), array(grad)
    halves = values.dtype == np.float16
    inner = np.empty(0, np.float32) if halves else values
    kernel = choice.kernel("widen" if first else "accumulate", (sums, inner), ())

    def piece(start: int, stop: int) -> None:
        if not halves:
            kernel(sums[start:stop], values[start:stop])
            return
        for at in range(start, stop, half.BLOCK):
            part = slice(at, min(at + half.BLOCK, stop))
            kernel(sums[part], half.widened(values[part]))

    _pool(workers).run(piece, n)


def add_mean(total: Tensor, parts: Tensor, workers: Workers | None = None) -> None:
    """``total += mean of the rows of parts``, which are added in fp32 from the first to the last.

    Args:
        total: fp32, shape [n]; written.
        parts: shape [ranks, n], fp32 or bf16; rows contiguous.
        workers: threads to use; the common ones if not given.

    Raises:
        UsageError: a shape or dtype that does not fit.
    """
    n, ranks = check(total, parts[0]), len(parts)
    if total.dtype is not torch.float32 or parts.dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(
            f"means of float32 or bfloat16 are added in float32, not {parts.dtype} in {total.dtype}"
        )
    if n == 0:
        return
    stride = parts.stride(0)
    flat = parts.as_strided(((ranks - 1) * stride + n,), (1,))
    sums, rows = array(total), array(flat)
    kernel = choice.kernel("add_mean", (sums, rows), (stride, ranks))

    def piece(start: int, stop: int) -> None:
        kernel(sums[start:stop], rows[start:], stride, ranks)

    _pool(workers).run(piece, n)


def widen(source: Tensor, out: Tensor, workers: Workers | None = None) -> None:
    """``out = float32(source)``, exact.

    Args:
        source: shape [n], fp32, bf16 or fp16.
        out: fp32, shape [n]; written.
        workers: threads to use; the common ones if not given.
    """
    accumulate(out, source, first=True, workers=workers)


def _pool(given: Workers | None) -> Workers:
    return given or workers()
