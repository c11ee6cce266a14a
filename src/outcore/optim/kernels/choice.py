"""Which implementation of a kernel runs: machine code, or torch where numba can't be had."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outcore.optim.kernels import fallback

Array = NDArray[Any]
Kernel = Callable[..., None]

_lock = threading.Lock()
_chosen: dict[tuple[object, ...], Kernel] = {}


def kernel(name: str, arrays: Sequence[Array | None], scalars: Sequence[object]) -> Kernel:
    """The kernel of this name for arrays of these dtypes, compiled and ready for any thread.

    Args:
        name: a function of `outcore.optim.kernels.compiled` and `outcore.optim.kernels.fallback`.
        arrays: the arrays it will be called with; they are not touched.
        scalars: the arguments after the arrays.
    """
    key = (name, *(None if array is None else array.dtype for array in arrays))
    found = _chosen.get(key)
    if found is None:
        with _lock:
            found = _chosen.setdefault(key, _choose(name, arrays, scalars))
    return found


def _choose(name: str, arrays: Sequence[Array | None], scalars: Sequence[object]) -> Kernel:
    spare: Kernel = getattr(fallback, name)
    module = _compiled()
    if module is None:
        return spare
    fast: Kernel = getattr(module, name)
    try:
        fast(*(None if array is None else np.empty(0, array.dtype) for array in arrays), *scalars)
    except Exception as error:  # whatever numba or LLVM raise: an update that is slow beats none
        _say(f"the kernel {name!r} could not be compiled", error)
        return spare
    return fast


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from outcore.optim.kernels import compiled
    except Exception as error:  # a broken numba raises more than ImportError
        _say("numba can't be imported", error)
        return None
    return compiled


def _say(what: str, error: Exception) -> None:
    warnings.warn(
        f"{what} ({type(error).__name__}: {error}); updates run through torch, with the same results "
        "but several times slower. Install a numba that fits this Python and NumPy",
        RuntimeWarning,
        stacklevel=2,
    )
