"""How kernels are found, compiled and spread over threads."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import types
from typing import Any

import numba
import numpy as np
import pytest
import torch

from optim.kernel_cases import RULES, State, assert_same, values
from outcore.errors import UsageError
from outcore.optim import kernels
from outcore.optim.kernels import Master, Workers, choice, compiled, workers

F32, U16 = np.float32, np.uint16


def test_importing_the_optimizers_does_not_import_numba() -> None:
    code = "import sys, outcore.optim.kernels; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def updated() -> dict[str, torch.Tensor]:
    rule, _ = RULES["adamw"]
    state = State.new(rule, values(500), torch.bfloat16, Master.SPLIT)
    state.step("adamw", values(500, 1).to(torch.bfloat16), 1)
    return state.read(rule)


def test_without_numba_a_warning_is_given_and_torch_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = updated()
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "outcore.optim.kernels.compiled")
    monkeypatch.delattr(kernels, "compiled")
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_compiled", functools.cache(choice._compiled.__wrapped__))
    with pytest.warns(RuntimeWarning, match="numba can't be imported"):
        found = updated()
    assert_same(expected, found)
    updated()  # warnings are errors here, and this gives none


def test_a_kernel_that_does_not_compile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = updated()

    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_compiled", lambda: types.SimpleNamespace(adamw=broken))
    with pytest.warns(RuntimeWarning, match="'adamw' could not be compiled.*no such instruction"):
        found = updated()
    assert_same(expected, found)


@pytest.mark.parametrize(
    ("name", "param", "grad", "extra", "moments", "scalars"),
    [
        ("adamw", F32, F32, None, 2, 13),
        ("adamw", U16, U16, F32, 2, 13),
        ("adamw", U16, U16, U16, 2, 13),
        ("sgd_momentum", U16, U16, F32, 1, 10),
        ("lion", U16, U16, F32, 1, 9),
        ("adagrad", U16, U16, U16, 1, 7),
    ],
)
def test_kernels_are_vectorised_and_never_fused(
    name: str, param: Any, grad: Any, extra: Any, moments: int, scalars: int
) -> None:
    def array(dtype: Any) -> Any:
        return numba.types.none if dtype is None else numba.from_dtype(np.dtype(dtype))[::1]

    signature = (array(param), array(grad), array(extra), *[array(F32)] * moments, *[numba.float32] * scalars)
    # compiled anew, because what comes from numba's cache has no text to look at
    kernel = numba.njit(**compiled._OPTIONS)(getattr(compiled, name).py_func)
    kernel.compile(signature)
    text = kernel.inspect_llvm(kernel.signatures[0])
    assert "fma" not in text
    assert "fmuladd" not in text
    assert " x float>" in text
    if name in ("adamw", "adagrad"):
        assert "sqrt.v" in text


def test_every_piece_is_done_once() -> None:
    with Workers(4) as pool:
        for n in (0, 1, 9, 10, 11, 1_000):
            done = np.zeros(n, np.int64)

            def mark(start: int, stop: int, done: Any = done) -> None:
                done[start:stop] += 1

            pool.run(mark, n, grain=10)
            assert bool((done == 1).all())


def test_a_failure_in_any_thread_is_raised() -> None:
    barrier = threading.Barrier(2, timeout=30)
    home = threading.get_ident()

    def fail_elsewhere(start: int, stop: int) -> None:
        barrier.wait()
        if threading.get_ident() != home:
            raise ZeroDivisionError

    with Workers(2) as pool, pytest.raises(ZeroDivisionError):
        pool.run(fail_elsewhere, 2, grain=1)


def test_a_pool_has_threads() -> None:
    with pytest.raises(UsageError, match="at least 1 thread"):
        Workers(0)


def test_the_common_pool_is_made_once() -> None:
    assert workers() is workers()
    assert workers().threads >= 1
