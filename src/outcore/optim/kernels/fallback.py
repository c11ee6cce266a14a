"""The kernels of `outcore.optim.kernels.compiled` in torch: the same names, arguments and bits.

Blocks are small enough to stay in cache and below the size from which torch would start threads of its own.
Only operations that round once are used: no `lerp`, `addcmul` or ``alpha=``, which some builds fuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outcore.optim.kernels.codecs import SHARED, SHIFTS, packed, unpacked
from outcore.optim.kernels.transform import GradTransform

Array = NDArray[Any]
Transform = tuple[float, float, float]

BLOCK = 16_384
LANES = 256
OTHER = 0x55555555


class _Block:
    """The tensors of one block of a kernel's arguments, and how its master is read and written."""

    def __init__(self, param: Array, grad: Array, extra: Array | None, moments: list[Array]) -> None:
        self._param = torch.from_numpy(param)
        self._grad = _values(grad)
        self._extra = None if extra is None else torch.from_numpy(extra)
        self.moments = [torch.from_numpy(moment) for moment in moments]

    def master(self) -> Tensor:
        """The fp32 master, which may be the stored one: not to be changed in place."""
        if self._extra is None:
            return self._param
        if self._extra.dtype is torch.float32:
            return self._extra
        carry = self.moments[-1].signbit().int()
        upper = (self._param.int() - carry) << 16
        return (upper | self._extra.int()).view(torch.float32)

    def gradient(self, transform: Transform, master: Tensor, decay: float | None) -> Tensor:
        value = GradTransform(*map(float, transform)).apply(self._grad)
        return value if decay is None else value + master * decay

    def store(self, master: Tensor, moments: list[Tensor]) -> None:
        master = _quiet(master)
        for own, new in zip(self.moments, moments, strict=True):
            own.copy_(_quiet(new))
        if self._extra is None:
            self._param.copy_(master)
            return
        bits = master.view(torch.int32)
        upper = bits >> 16
        rounded = (bits + 0x7FFF + (upper & 1)) >> 16
        self._param.view(torch.int16).copy_(rounded)
        if self._extra.dtype is torch.float32:
            self._extra.copy_(master)
            return
        self._extra.view(torch.int16).copy_((bits << 16) >> 16)
        self.moments[-1].view(torch.int32).bitwise_or_((rounded - upper) << 31)


def _blocks(param: Array, grad: Array, extra: Array | None, *moments: Array) -> Iterator[_Block]:
    for start in range(0, param.size, BLOCK):
        part = slice(start, start + BLOCK)
        yield _Block(
            param[part], grad[part], None if extra is None else extra[part], [m[part] for m in moments]
        )


def _values(array: Array) -> Tensor:
    """fp32 as it is, bf16 bits widened."""
    values = torch.from_numpy(array)
    return values if values.dtype is torch.float32 else values.view(torch.bfloat16).float()


def _root(values: Tensor) -> Tensor:
    """The square root by NumPy, which rounds correctly; torch may call a library that does not."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def _quiet(values: Tensor) -> Tensor:
    return torch.where(values == values, values, math.nan)


# -- update rules ---------------------------------------------------------------------------------


def adamw(
    param: Array, grad: Array, extra: Array | None, first: Array, second: Array,
    before: float, clamp: float, after: float,
    keep: float, coupled: bool, decay: float, beta1: float, rest1: float, beta2: float, rest2: float,
    unbias: float, eps: float, rate: float,
) -> None:  # fmt: skip
    for block in _blocks(param, grad, extra, first, second):
        x = block.master()
        g = block.gradient((before, clamp, after), x, decay if coupled else None)
        m = _quiet(block.moments[0] * beta1 + g * rest1)
        v = _quiet(block.moments[1].abs() * beta2 + g * rest2 * g)
        block.store(x * keep + m * rate / (_root(v) * unbias + eps), [m, v])


def _thresholds(dither: int, n: int) -> Tensor:
    """Where rounding to fewer bits goes up, int64 below 2^32, shape [n]; see `outcore.optim.kernels.codecs`."""
    return (int(dither) + (torch.arange(n) & 127) * 0x9E3779B1) & 0xFFFFFFFF


def _cut(values: Tensor, thresholds: Tensor, shift: int) -> Tensor:
    """The uppermost bits of magnitudes, int32."""
    bits = (values.view(torch.int32) & 0x7FFFFFFF).long()
    return ((bits + (thresholds >> (32 - shift))) >> shift).int()


def adamw_bf16(
    param: Array, grad: Array, extra: Array | None, first: Array, second: Array,
    before: float, clamp: float, after: float,
    keep: float, coupled: bool, decay: float, beta1: float, rest1: float, beta2: float, rest2: float,
    unbias: float, eps: float, rate: float, dither: int,
) -> None:  # fmt: skip
    for start in range(0, param.size, BLOCK):
        part = slice(start, start + BLOCK)
        kept = [torch.from_numpy(whole[part].view(np.int16)) for whole in (first, second)]
        wide = [(moment.int() << 16).view(torch.float32) for moment in kept]
        adamw(
            param[part], grad[part], None if extra is None else extra[part], wide[0].numpy(), wide[1].numpy(),
            before, clamp, after, keep, coupled, decay, beta1, rest1, beta2, rest2, unbias, eps, rate,
        )  # fmt: skip
        thresholds = _thresholds(dither, kept[0].numel())
        for moment, values, own in zip(kept, wide, (0, OTHER), strict=True):
            cut = _cut(values, (thresholds + own) & 0xFFFFFFFF, 16)
            moment.copy_(cut | ((values.view(torch.int32) >> 16) & -0x8000))


def adamw_8bit(
    param: Array, grad: Array, extra: Array | None, first: Array, second: Array, window1: Array, window2: Array,
    before: float, clamp: float, after: float,
    keep: float, coupled: bool, decay: float, beta1: float, rest1: float, beta2: float, rest2: float,
    unbias: float, eps: float, rate: float, dither: int,
) -> None:  # fmt: skip
    for start in range(0, param.size, BLOCK):
        part = slice(start, start + BLOCK)
        blocks = slice(start // SHARED, (start + BLOCK) // SHARED)
        kept = [torch.from_numpy(whole[part]) for whole in (first, second)]
        windows = [torch.from_numpy(whole[blocks].view(np.int16)) for whole in (window1, window2)]
        wide = [unpacked(kept[k], windows[k], SHIFTS[k]) for k in range(2)]
        adamw(
            param[part], grad[part], None if extra is None else extra[part], wide[0].numpy(), wide[1].numpy(),
            before, clamp, after, keep, coupled, decay, beta1, rest1, beta2, rest2, unbias, eps, rate,
        )  # fmt: skip
        thresholds = _thresholds(dither, kept[0].numel())
        for k, own in enumerate((0, OTHER)):
            cut = _cut(wide[k], (thresholds + own) & 0xFFFFFFFF, SHIFTS[k])
            codes, begin = packed(cut, wide[k].view(torch.int32) < 0, (wide[k].abs() > 0) & (k == 1))
            kept[k].copy_(codes)
            windows[k].copy_(begin)


def sgd(
    param: Array, grad: Array, extra: Array | None,
    before: float, clamp: float, after: float,
    decays: bool, decay: float, rate: float,
) -> None:  # fmt: skip
    for block in _blocks(param, grad, extra):
        x = block.master()
        g = block.gradient((before, clamp, after), x, decay if decays else None)
        block.store(x + g * rate, [])


def sgd_momentum(
    param: Array, grad: Array, extra: Array | None, buffer: Array,
    before: float, clamp: float, after: float,
    decays: bool, decay: float, rate: float,
    momentum: float, rest: float, nesterov: bool, initial: bool,
) -> None:  # fmt: skip
    for block in _blocks(param, grad, extra, buffer):
        x = block.master()
        g = block.gradient((before, clamp, after), x, decay if decays else None)
        b = _quiet(g if initial else block.moments[0] * momentum + g * rest)
        g = g + b * momentum if nesterov else b
        block.store(x + g * rate, [b])


def lion(
    param: Array, grad: Array, extra: Array | None, average: Array,
    before: float, clamp: float, after: float,
    keep: float, beta1: float, rest1: float, beta2: float, rest2: float, rate: float,
) -> None:  # fmt: skip
    for block in _blocks(param, grad, extra, average):
        x, m = block.master(), block.moments[0]
        g = block.gradient((before, clamp, after), x, None)
        direction = m * beta1 + g * rest1
        sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, direction))
        block.store(x * keep + sign * rate, [m * beta2 + g * rest2])


def adagrad(
    param: Array, grad: Array, extra: Array | None, total: Array,
    before: float, clamp: float, after: float,
    decays: bool, decay: float, eps: float, rate: float,
) -> None:  # fmt: skip
    for block in _blocks(param, grad, extra, total):
        x = block.master()
        g = block.gradient((before, clamp, after), x, decay if decays else None)
        s = _quiet(block.moments[0].abs() + g * g)
        block.store(x + g * rate / (_root(s) + eps), [s])


# -- gradients ------------------------------------------------------------------------------------


def widen(total: Array, grad: Array) -> None:
    for start in range(0, total.size, BLOCK):
        part = slice(start, start + BLOCK)
        torch.from_numpy(total[part]).copy_(_values(grad[part]))


def accumulate(total: Array, grad: Array) -> None:
    for start in range(0, total.size, BLOCK):
        own = torch.from_numpy(total[start : start + BLOCK])
        own.copy_(_quiet(own + _values(grad[start : start + BLOCK])))


def add_mean(total: Array, rows: Array, stride: int, ranks: int) -> None:
    for start in range(0, total.size, BLOCK):
        own = torch.from_numpy(total[start : start + BLOCK])
        parts = (rows[rank * stride + start :][: own.numel()] for rank in range(ranks))
        sums = _values(next(parts)).clone()
        for part in parts:
            sums += _values(part)
        own.copy_(_quiet(own + sums / ranks))


def sum_of_squares(grad: Array, sums: Array, block: int, before: float, clamp: float, after: float) -> None:
    transform = GradTransform(float(before), float(clamp), float(after))
    for b in range(sums.size):
        values = transform.apply(_values(grad[b * block : (b + 1) * block])).double()
        values *= values
        lanes = torch.zeros(LANES, dtype=torch.float64)
        for start in range(0, values.numel(), LANES):
            row = values[start : start + LANES]
            lanes[: row.numel()] += row
        half = LANES // 2
        while half > 0:
            lanes[:half] += lanes[half : 2 * half]
            half //= 2
        sums[b] = math.nan if lanes[0].isnan() else lanes[0].item()
