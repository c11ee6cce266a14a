"""The update loops as machine code, made by numba. Imported at the first update, never before.

[Note: Same bits everywhere]
Every kernel is an elementwise loop in plain IEEE arithmetic: one rounding per operation, nothing
reassociated, nothing contracted to a fused multiply-add. So an element's new value depends on its old values
alone, not on where a range was cut, how it is aligned, or which thread had it. The one thing IEEE leaves open
is which NaN comes out when two go in; so each value that is written passes through `_quiet` first.

All kernels live in this file because numba's cache on disk notices changes of the file that holds a kernel,
but not of files that the kernel calls into.

Arrays are 1-D, contiguous and of one length. bf16 comes as uint16 bits, fp32 as float32. ``extra`` says where
the fp32 master is (see `outcore.optim.kernels.master`): ``None`` (it is ``param``), the master itself, or its
low 16 bits as uint16. Scalars are float32 or bool. `outcore.optim.kernels.fallback` does the same in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

Function = TypeVar("Function", bound=Callable[..., Any])
Array = Any
Scalar = Any

_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic

LANES = 256
ROW = 2048
ZERO, ONE, NAN = np.float32(0.0), np.float32(1.0), np.float32(np.nan)
U0, U1, U2, U7, U15, U16 = (np.uint32(k) for k in (0, 1, 2, 7, 15, 16))
U20, U21, U31, U32, U127 = (np.uint32(k) for k in (20, 21, 31, 32, 127))
GOLDEN, OTHER = np.uint32(0x9E3779B1), np.uint32(0x55555555)
HALF = np.uint32(0x7FFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)


def _jit(function: Function) -> Function:
    """Compile at the first call, and keep the result on disk where that is possible."""
    try:
        compiled: Function = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba finds no directory that it may keep its cache in
        compiled = numba.njit(**_OPTIONS)(function)
    return compiled


def _by_type(stub: Callable[..., Any]) -> Callable[[Function], Function]:
    """Choose what stands for ``stub`` by the types of its arguments."""
    chosen: Callable[[Function], Function] = overload(stub, jit_options=_OPTIONS, strict=False)
    return chosen


@_intrinsic
def _bits(_context: object, value: Any) -> tuple[Any, Any]:
    """The bits of a float32 as uint32."""
    return types.uint32(value), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.IntType(32))


@_intrinsic
def _float(_context: object, bits: Any) -> tuple[Any, Any]:
    """The float32 with these uint32 bits."""
    return types.float32(bits), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.FloatType())


@_jit
def _widened(bf16: Scalar) -> Scalar:
    return _float(np.uint32(np.uint32(bf16) << U16))


@_jit
def _rounded(value: Scalar) -> Scalar:
    """The nearest bf16 of a float32 (ties to even) that is no NaN or the quiet one."""
    bits = _bits(value)
    return np.uint16(np.uint32(bits + HALF + np.uint32(np.uint32(bits >> U16) & U1)) >> U16)


@_jit
def _quiet(value: Scalar) -> Scalar:
    return value if value == value else NAN


@_jit
def _magnitude(value: Scalar) -> Scalar:
    """The value without its sign bit, which the split master may have taken (NaN included)."""
    return _float(np.uint32(_bits(value) & MAGNITUDE))


# -- what depends on types ------------------------------------------------------------------------


def _value(array: Array, i: int) -> Any:
    """Element ``i`` as float32."""


@_by_type(_value)
def _value_of(array: Any, i: Any) -> Any:
    if array.dtype == types.float32:
        return lambda array, i: array[i]
    return lambda array, i: _widened(array[i])


def _master(param: Array, extra: Array, second: Scalar, i: int) -> Any:
    """The fp32 master of element ``i``; ``second`` is its second moment as stored."""


@_by_type(_master)
def _master_of(param: Any, extra: Any, second: Any, i: Any) -> Any:
    if isinstance(extra, types.NoneType):
        return lambda param, extra, second, i: param[i]
    if extra.dtype == types.float32:
        return lambda param, extra, second, i: extra[i]

    def unsplit(param: Array, extra: Array, second: Scalar, i: int) -> Scalar:
        upper = np.uint32(np.uint32(param[i]) - np.uint32(_bits(second) >> U31))
        return _float(np.uint32(np.uint32(upper << U16) | np.uint32(extra[i])))

    return unsplit


def _store(param: Array, extra: Array, i: int, master: Scalar, second: Scalar) -> Any:
    """Write the master of element ``i``; gives the second moment as it is to be stored."""


@_by_type(_store)
def _store_to(param: Any, extra: Any, i: Any, master: Any, second: Any) -> Any:
    if isinstance(extra, types.NoneType):

        def alone(param: Array, extra: Array, i: int, master: Scalar, second: Scalar) -> Scalar:
            param[i] = master
            return second

        return alone
    if extra.dtype == types.float32:

        def full(param: Array, extra: Array, i: int, master: Scalar, second: Scalar) -> Scalar:
            param[i] = _rounded(master)
            extra[i] = master
            return second

        return full

    def split(param: Array, extra: Array, i: int, master: Scalar, second: Scalar) -> Scalar:
        bits, rounded = _bits(master), _rounded(master)
        carry = np.uint32(np.uint32(rounded) - np.uint32(bits >> U16))
        param[i] = rounded
        extra[i] = np.uint16(bits)
        return _float(np.uint32(_bits(second) | np.uint32(carry << U31)))

    return split


def _part(extra: Array, start: int, stop: int) -> Any:
    """A slice of ``extra``, if there is one."""


@_by_type(_part)
def _part_of(extra: Any, start: Any, stop: Any) -> Any:
    if isinstance(extra, types.NoneType):
        return lambda extra, start, stop: None
    return lambda extra, start, stop: extra[start:stop]


@_jit
def _gradient(value: Scalar, before: Scalar, clamp: Scalar, after: Scalar) -> Scalar:
    """A gradient scaled, clamped and scaled again; a NaN stays one."""
    value = value * before
    value = clamp if value > clamp else value
    value = -clamp if value < -clamp else value
    return value * after


# -- update rules ---------------------------------------------------------------------------------


@_jit
def adamw(
    param: Array, grad: Array, extra: Array, first: Array, second: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    keep: Scalar, coupled: Scalar, decay: Scalar, beta1: Scalar, rest1: Scalar, beta2: Scalar, rest2: Scalar,
    unbias: Scalar, eps: Scalar, rate: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        stored = second[i]
        x = _master(param, extra, stored, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        g = g + decay * x if coupled else g
        m = _quiet(beta1 * first[i] + rest1 * g)
        v = _quiet(beta2 * _magnitude(stored) + rest2 * g * g)
        x = _quiet(keep * x + rate * m / (sqrt(v) * unbias + eps))
        first[i] = m
        second[i] = _store(param, extra, i, x, v)


@_jit
def _cut(bits: Scalar, threshold: Scalar, shift: Scalar) -> Scalar:
    """The uppermost bits of a magnitude; what is lost rounds up where it and the threshold overflow."""
    lost = np.uint32(threshold >> np.uint32(U32 - shift))
    return np.uint32(np.uint32(bits + lost) >> shift)


@_jit
def _threshold(dither: Scalar, i: int) -> Scalar:
    return np.uint32(np.uint32(dither) + np.uint32(np.uint32(i & 127) * GOLDEN))


@_jit
def adamw_bf16(
    param: Array, grad: Array, extra: Array, first: Array, second: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    keep: Scalar, coupled: Scalar, decay: Scalar, beta1: Scalar, rest1: Scalar, beta2: Scalar, rest2: Scalar,
    unbias: Scalar, eps: Scalar, rate: Scalar, dither: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        stored = _widened(second[i])
        x = _master(param, extra, stored, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        g = g + decay * x if coupled else g
        m = _quiet(beta1 * _widened(first[i]) + rest1 * g)
        v = _quiet(beta2 * _magnitude(stored) + rest2 * g * g)
        x = _quiet(keep * x + rate * m / (sqrt(v) * unbias + eps))
        carry = np.uint32(_bits(_store(param, extra, i, x, ZERO)) >> U16)
        threshold = _threshold(dither, i)
        sign = np.uint32(np.uint32(_bits(m) >> U31) << U15)
        first[i] = np.uint16(_cut(np.uint32(_bits(m) & MAGNITUDE), threshold, U16) | sign)
        second[i] = np.uint16(_cut(_bits(v), np.uint32(threshold + OTHER), U16) | carry)


@_jit
def _unpacked(code: Scalar, begin: Scalar, shift: Scalar) -> Scalar:
    """The bits of the magnitude of a code of 7 bits, given where its window begins."""
    low = np.uint32(code & U127)
    bits = np.uint32(np.uint32(low + begin) << shift)
    return bits if low > U0 else U0


@_jit
def adamw_8bit(
    param: Array, grad: Array, extra: Array, first: Array, second: Array, window1: Array, window2: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    keep: Scalar, coupled: Scalar, decay: Scalar, beta1: Scalar, rest1: Scalar, beta2: Scalar, rest2: Scalar,
    unbias: Scalar, eps: Scalar, rate: Scalar, dither: Scalar,
) -> None:  # fmt: skip
    """Blocks of `SHARED`: first the arithmetic, then the codes, which need the largest of all."""
    cut1, cut2 = np.empty(128, np.uint32), np.empty(128, np.uint32)
    top1, top2 = np.empty(128, np.uint32), np.empty(128, np.uint32)
    for b in range(window1.size):
        start, stop = b * 128, min(b * 128 + 128, param.size)
        weights, rest, codes1, codes2 = (
            param[start:stop],
            _part(extra, start, stop),
            first[start:stop],
            second[start:stop],
        )
        values = grad[start:stop]
        old1, old2 = np.uint32(window1[b]), np.uint32(window2[b])
        for j in range(weights.size):
            code1, code2 = np.uint32(codes1[j]), np.uint32(codes2[j])
            x = _master(weights, rest, _float(np.uint32(np.uint32(code2 >> U7) << U31)), j)
            g = _gradient(_value(values, j), before, clamp, after)
            g = g + decay * x if coupled else g
            sign = np.uint32(np.uint32(code1 >> U7) << U31)
            m = _quiet(beta1 * _float(np.uint32(_unpacked(code1, old1, U20) | sign)) + rest1 * g)
            v = _quiet(beta2 * _float(_unpacked(code2, old2, U21)) + rest2 * g * g)
            x = _quiet(keep * x + rate * m / (sqrt(v) * unbias + eps))
            carry = np.uint32(_bits(_store(weights, rest, j, x, ZERO)) >> U31)
            top2[j] = np.uint32(carry | (U2 if v > ZERO else U0))
            top1[j] = np.uint32(_bits(m) >> U31)
            threshold = _threshold(dither, j)
            cut1[j] = _cut(np.uint32(_bits(m) & MAGNITUDE), threshold, U20)
            cut2[j] = _cut(_bits(v), np.uint32(threshold + OTHER), U21)
        most1, most2 = U127, U127
        for j in range(weights.size):
            most1, most2 = max(most1, cut1[j]), max(most2, cut2[j])
        new1, new2 = np.uint32(most1 - U127), np.uint32(most2 - U127)
        window1[b], window2[b] = new1, new2
        for j in range(weights.size):
            code1 = np.uint32(cut1[j] - new1) if cut1[j] > new1 else U0
            code2 = np.uint32(cut2[j] - new2) if cut2[j] > new2 else np.uint32(top2[j] >> U1)
            codes1[j] = np.uint8(code1 | np.uint32(top1[j] << U7))
            codes2[j] = np.uint8(code2 | np.uint32(np.uint32(top2[j] & U1) << U7))


@_jit
def sgd(
    param: Array, grad: Array, extra: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    decays: Scalar, decay: Scalar, rate: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        x = _master(param, extra, ZERO, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        g = g + decay * x if decays else g
        _store(param, extra, i, _quiet(x + rate * g), ZERO)


@_jit
def sgd_momentum(
    param: Array, grad: Array, extra: Array, buffer: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    decays: Scalar, decay: Scalar, rate: Scalar,
    momentum: Scalar, rest: Scalar, nesterov: Scalar, initial: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        x = _master(param, extra, ZERO, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        g = g + decay * x if decays else g
        b = _quiet(g if initial else momentum * buffer[i] + rest * g)
        g = g + momentum * b if nesterov else b
        buffer[i] = b
        _store(param, extra, i, _quiet(x + rate * g), ZERO)


@_jit
def lion(
    param: Array, grad: Array, extra: Array, average: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    keep: Scalar, beta1: Scalar, rest1: Scalar, beta2: Scalar, rest2: Scalar, rate: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        x = _master(param, extra, ZERO, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        m = average[i]
        direction = beta1 * m + rest1 * g
        sign = ONE if direction > ZERO else direction
        sign = -ONE if direction < ZERO else sign
        average[i] = _quiet(beta2 * m + rest2 * g)
        _store(param, extra, i, _quiet(keep * x + rate * sign), ZERO)


@_jit
def adagrad(
    param: Array, grad: Array, extra: Array, total: Array,
    before: Scalar, clamp: Scalar, after: Scalar,
    decays: Scalar, decay: Scalar, eps: Scalar, rate: Scalar,
) -> None:  # fmt: skip
    for i in range(param.size):
        stored = total[i]
        x = _master(param, extra, stored, i)
        g = _gradient(_value(grad, i), before, clamp, after)
        g = g + decay * x if decays else g
        s = _quiet(_magnitude(stored) + g * g)
        x = _quiet(x + rate * g / (sqrt(s) + eps))
        total[i] = _store(param, extra, i, x, s)


# -- gradients ------------------------------------------------------------------------------------


@_jit
def widen(total: Array, grad: Array) -> None:
    for i in range(total.size):
        total[i] = _value(grad, i)


@_jit
def accumulate(total: Array, grad: Array) -> None:
    for i in range(total.size):
        total[i] = _quiet(total[i] + _value(grad, i))


@_jit
def add_mean(total: Array, rows: Array, stride: int, ranks: int) -> None:
    """``rows`` holds one row for each rank, ``stride`` elements apart; they are added from the first to the last."""
    divisor, sums = np.float32(ranks), np.empty(ROW, np.float32)
    for start in range(0, total.size, ROW):
        own = total[start : min(start + ROW, total.size)]
        for rank in range(ranks):
            row = rows[rank * stride + start : rank * stride + start + own.size]
            if rank == 0:
                for i in range(own.size):
                    sums[i] = _value(row, i)
            else:
                for i in range(own.size):
                    sums[i] += _value(row, i)
        for i in range(own.size):
            own[i] = _quiet(own[i] + sums[i] / divisor)


@_jit
def sum_of_squares(
    grad: Array, sums: Array, block: int, before: Scalar, clamp: Scalar, after: Scalar
) -> None:
    """`LANES` running sums per block, folded in halves: an order that vectors of any width can follow."""
    lanes = np.empty(LANES, np.float64)
    for b in range(sums.size):
        values = grad[b * block : min((b + 1) * block, grad.size)]
        for j in range(LANES):
            lanes[j] = 0.0
        for start in range(0, values.size, LANES):
            row = values[start : min(start + LANES, values.size)]
            for j in range(row.size):
                g = np.float64(_gradient(_value(row, j), before, clamp, after))
                lanes[j] += g * g
        half = LANES // 2
        while half > 0:
            for j in range(half):
                lanes[j] += lanes[half + j]
            half //= 2
        sums[b] = lanes[0] if lanes[0] == lanes[0] else np.nan
