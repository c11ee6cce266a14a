"""What a meter leaves behind: nothing, whether its lap ends well, is refused, or its model is dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import outcore
from exact.shapes import Stack
from outcore.errors import BudgetError
from outcore.offloaded import engine_of
from outcore.trace.meter import Meter

CPU = torch.device("cpu")


class Told:
    """Whom a meter tells. Refuses what is above ``most``."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.peak = 0

    def visit(self, storage: int) -> None:
        pass

    def observe(self, live: int) -> None:
        self.peak = live
        if live > self.most:
            raise MemoryError

    def meter(self) -> Meter:
        return Meter(CPU, self.visit, self.observe)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_what_is_refused_is_credited_when_it_goes() -> None:
    told = Told(most=4000)
    with told.meter() as meter:
        kept = torch.ones(100)
        with suppress(MemoryError):
            torch.ones(1000)
        assert (told.peak, meter.live) == (4400, 400)
        del kept
        assert meter.live == 0


def test_a_meter_whose_owner_is_gone_is_gone_too() -> None:
    told = Told()
    told.meter().__enter__()
    del told
    assert _get_current_dispatch_mode_stack() == []


def test_a_meter_under_another_mode_lets_all_pass_and_goes_when_it_can() -> None:
    told = Told(most=0)
    told.meter().__enter__()
    with Passing():
        del told
        torch.ones(1000)
    assert len(_get_current_dispatch_mode_stack()) == 1
    torch.ones(1000)
    other = Told()
    with other.meter():
        assert len(_get_current_dispatch_mode_stack()) == 1
    assert _get_current_dispatch_mode_stack() == []


def test_a_meter_entered_outside_of_inference_mode_is_left_there() -> None:
    told = Told()
    told.meter().__enter__()
    with torch.inference_mode():
        del told
        torch.ones(10)
    other = Told()
    with other.meter():
        pass
    assert _get_current_dispatch_mode_stack() == []


def test_a_retired_meter_counts_no_more() -> None:
    told = Told()
    with told.meter() as meter:
        meter.retire()
        kept = torch.ones(100)
        assert (meter.live, told.peak, len(kept)) == (0, 0, 100)


# -- with a model ---------------------------------------------------------------------------------


def spread(disk: Path, host: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Stack(3)
    optimizer = outcore.SGD(model.parameters(), lr=0.1)
    budget = outcore.Budget(host=host, disk=disk)
    outcore.offload(model, optimizer, budget=budget, precision=outcore.Precision("fp32"), chunk_size="128KiB")
    engine_of(model).prelude.before = lambda *batch: None  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("rows", [8, 4096])
def test_a_dropped_model_takes_its_meter_along(rows: int, tmp_path: Path) -> None:
    """After one forward, or one that was refused; nothing else is called."""
    model = spread(tmp_path, "4MiB")
    engine = weakref.ref(engine_of(model))
    try:
        model(torch.randn(rows, 32))
    except BudgetError:
        assert rows == 4096
    del model
    gc.collect()
    assert engine() is None
    assert _get_current_dispatch_mode_stack() == []
    torch.ones(2 << 20)


def test_nothing_of_a_refused_forward_stays(tmp_path: Path) -> None:
    """Not until the collector runs, either: the next batch has to fit."""
    model = spread(tmp_path, "4MiB")
    with without_collector():
        seen: list[weakref.ref[torch.Tensor]] = []
        handle = model.embed.register_forward_hook(  # type: ignore[union-attr]
            lambda module, args, output: seen.append(weakref.ref(output))
        )
        with suppress(BudgetError):
            model(torch.randn(2048, 32))
        handle.remove()
        assert _get_current_dispatch_mode_stack() == []
        assert [reference() for reference in seen] == [None]
        torch.ones(2 << 20)
        model(torch.randn(8, 32)).square().mean().backward()
    outcore.release(model)


def test_after_a_refused_backward_operators_are_the_users(tmp_path: Path) -> None:
    model = spread(tmp_path, "4MiB")

    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return gradient + torch.zeros(2 << 20)[0]

    loss = Wasteful.apply(model(torch.randn(8, 32)).square().mean())  # type: ignore[no-untyped-call]
    with pytest.raises(BudgetError):
        loss.backward()
    torch.ones(2 << 20)
    model(torch.randn(8, 32)).square().mean().backward()
    outcore.release(model)


def test_a_forward_that_raised_measures_nothing(tmp_path: Path) -> None:
    """What it took up to there is no measure for the next of its kind."""
    model = spread(tmp_path, "6MiB")

    def stop(module: torch.nn.Module, args: object) -> None:
        raise ZeroDivisionError

    x = torch.randn(256, 32)
    handle = model.blocks[1].register_forward_pre_hook(stop)  # type: ignore[index, union-attr]
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    gauge = engine_of(model).gauge
    assert gauge.largest == 0
    model(x).square().mean().backward()
    engine_of(model).gauge.end()
    assert gauge.largest > 256 * 3 * 160 * 4
    outcore.release(model)
