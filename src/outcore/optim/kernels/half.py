"""fp16 parameters and gradients: converted block by block around the fp32 kernels.

fp16 parameters have a full fp32 master, so the fp32 kernel runs on that, and the parameter is rounded from it
while the block is still in cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outcore.optim.kernels import choice
from outcore.optim.kernels.choice import Array, Kernel

BLOCK = 32_768
"""Elements converted at a time: in cache, and the most that torch converts without threads of its own."""


def around(name: str, arrays: list[Array | None], scalars: tuple[Any, ...]) -> Kernel:
    """A kernel like ``choice.kernel(name, ...)`` that also takes float16 for ``param`` and ``grad``.

    Args:
        name: an update kernel.
        arrays: param, grad, extra and the moments.
        scalars: the arguments after them.
    """
    kernel = choice.kernel(name, _as_fp32(arrays), scalars)
    count = len(arrays)

    def run(*arguments: Any) -> None:
        pieces, rest = arguments[:count], arguments[count:]
        buffer = np.empty(min(BLOCK, pieces[0].size), np.float32)
        for start in range(0, pieces[0].size, BLOCK):
            part = slice(start, start + BLOCK)
            block: list[Any] = [None if piece is None else piece[part] for piece in pieces]
            inner = _as_fp32(block)
            if block[1].dtype == np.float16:
                inner[1] = buffer[: block[1].size]
                _convert(block[1], inner[1])
            kernel(*inner, *rest)
            if block[0].dtype == np.float16:
                _convert(block[2], block[0])

    return run


def widened(values: Array) -> Array:
    """float16 values as float32, exactly."""
    wide = np.empty(values.size, np.float32)
    for start in range(0, values.size, BLOCK):
        _convert(values[start : start + BLOCK], wide[start : start + BLOCK])
    return wide


def _as_fp32(arrays: list[Array | None]) -> list[Any]:
    """The arguments with the master in the place of an fp16 parameter, and no fp16 gradient yet."""
    param, grad, extra, *moments = arrays
    assert param is not None
    assert grad is not None
    if param.dtype == np.float16:
        param, extra = extra, None
    if grad.dtype == np.float16:
        grad = np.empty(0, np.float32)
    return [param, grad, extra, *moments]


def _convert(source: Array, target: Array) -> None:
    torch.from_numpy(target).copy_(torch.from_numpy(source))
