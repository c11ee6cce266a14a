"""The update loops as machine code, made by numba. Imported at the first update, never before.

[Note: Same bits everywhere]
Every kernel is an elementwise loop in plain IEEE arithmetic: one rounding per operation, nothing reassociated,
nothing contracted to a fused multiply-add. So an element's new value depends on its old values alone, not on
where a range was cut, how it is aligned, or which thread had it. The one thing IEEE leaves open is which NaN
comes out when two go in; each value written is therefore passed through `_quiet`.

All kernels live in this file because numba's cache on disk notices changes of the file that holds a kernel,
but not of files that the kernel calls into.

Arrays are 1-D and contiguous. bf16 comes as uint16 bits, everything else as it is. ``extra`` says where the fp32
master is (see `outcore.optim.kernels.master`): ``None``, the fp32 master, or the master's low 16 bits as uint16.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS: dict[str, object] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
_intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic

ONE = np.float32(1.0)
NAN = np.float32(np.nan)
NAN64 = np.nan


def _jit(function: Function) -> Function:
    """Compile at the first call, and keep the result on disk where that is possible."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba finds no directory that it may write its cache to
        return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def _overloads(stub: Callable[..., Any]) -> Callable[[Function], Function]:
    """Choose the body of ``stub`` by the types it is called with."""
    return overload(stub, jit_options=_OPTIONS)  # type: ignore[no-any-return]


# -- bits -----------------------------------------------------------------------------------------


@_intrinsic
def _bits(_context: object, value: types.Type) -> tuple[Any, Any]:
    """The bits of a float32 as uint32."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(value), emit


@_intrinsic
def _from_bits(_context: object, value: types.Type) -> tuple[Any, Any]:
    """The float32 with these uint32 bits."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(value), emit


@_intrinsic
def _from_bf16(_context: object, value: types.Type) -> tuple[Any, Any]:
    """The float32 that equals a bf16 given as uint16."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(value), emit


@_intrinsic
def _to_bf16(_context: object, value: types.Type) -> tuple[Any, Any]:
    """The nearest bf16 of a float32 that is no NaN, or the quiet one; ties go to even."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        sixteen = ir.Constant(word, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, sixteen), ir.IntType(16))

    return types.uint16(value), emit


@_intrinsic
def _unsplit(
    _context: object, param: types.Type, low: types.Type, second: types.Type
) -> tuple[Any, Any]:
    """The fp32 master from its rounded upper half, its lower half and the sign bit of ``second``."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        sixteen = ir.Constant(word, 16)
        carry = builder.lshr(builder.bitcast(args[2], word), ir.Constant(word, 31))
        upper = builder.sub(builder.zext(args[0], word), carry)
        bits = builder.or_(builder.shl(upper, sixteen), builder.zext(args[1], word))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(param, low, second), emit


@_intrinsic
def _low(_context: object, master: types.Type) -> tuple[Any, Any]:
    """The lower 16 bits of a float32."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.trunc(builder.bitcast(args[0], ir.IntType(32)), ir.IntType(16))

    return types.uint16(master), emit


@_intrinsic
def _with_carry(
    _context: object, second: types.Type, master: types.Type, param: types.Type
) -> tuple[Any, Any]:
    """``second`` with its sign bit set if ``master`` was rounded away from its upper half to ``param``."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        upper = builder.lshr(builder.bitcast(args[1], word), ir.Constant(word, 16))
        carry = builder.sub(builder.zext(args[2], word), upper)
        sign = builder.shl(carry, ir.Constant(word, 31))
        bits = builder.or_(builder.bitcast(args[0], word), sign)
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(second, master, param), emit


@_intrinsic
def _magnitude(_context: object, value: types.Type) -> tuple[Any, Any]:
    """A float32 with its sign bit cleared."""

    def emit(_ctx: Any, builder: Any, _sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        bits = builder.and_(builder.bitcast(args[0], word), ir.Constant(word, 0x7FFFFFFF))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), emit
