"""An exception in the middle of a step, and training on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from engine.twin import Run, assert_idle, floats, same, spread


class OopsError(Exception):
    pass


class StopError(BaseException):
    """As Ctrl-C: not an `Exception`, so torch does not call hooks that should always be called."""


def count_laps(run: Run) -> list[Hashable]:
    """The keys of the laps that begin from now on."""
    laps: list[Hashable] = []
    if run.engine is not None:
        clock = run.engine.clock
        begin = clock.lap

        def lap(key: Hashable) -> bool:
            laps.append(key)
            return begin(key)

        clock.lap = lap  # type: ignore[method-assign]
    return laps


@contextmanager
def raising(module: nn.Module, kind: type[BaseException] = OopsError) -> Iterator[None]:
    """The module's forward raises once it has computed."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise kind

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def modules_of(model: Any) -> list[nn.Module]:
    return [model.embed, model.blocks[1], model.blocks[1].up, model.head]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [OopsError, StopError])
@pytest.mark.parametrize("place", range(4))
def test_in_forward(place: int, kind: type[BaseException], recompute: bool, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        forwards, laps = 0, count_laps(run)
        for step in range(3):
            if not recompute or modules_of(run.model)[place] is not run.model.blocks[1]:
                forwards += 1
                with raising(modules_of(run.model)[place], kind), pytest.raises(kind):
                    run.loss(90 + step)
            run.train(step)
            forwards += 1
        assert run.engine is None or len(laps) == forwards  # each began its own lap

    same(script, tmp_path, activations=outcore.Activations("recompute" if recompute else "keep"))


def test_in_a_forward_within_a_forward(tmp_path: Path) -> None:
    """The model calls itself: what raises inside leaves the call around it open."""

    def script(run: Run) -> None:
        handles: list[Any] = []
        for step in range(2):

            def again(module: Any, args: Any, number: int = step) -> None:
                handles.pop().remove()
                with torch.no_grad(), raising(run.model.head), pytest.raises(OopsError):
                    run.loss(90 + number)

            handles.append(run.model.blocks[1].up.register_forward_pre_hook(again))
            run.train(step)

    same(script, tmp_path)


@pytest.mark.parametrize("kind", [OopsError, StopError])
def test_in_evaluation(kind: type[BaseException], tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(2):
            with torch.no_grad(), raising(run.model.blocks[1], kind), pytest.raises(kind):
                run.loss(90 + step)
            run.train(step)

    same(script, tmp_path)


def hook_that_raises(module: Any) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        raise OopsError

    return hook


@pytest.mark.parametrize("where", ["pre", "first pre", "post", "first post"])
def test_in_a_hook_of_the_users(where: str, tmp_path: Path) -> None:
    """Whatever the order of the hooks, ours see each call begin and end once."""

    def script(run: Run) -> None:
        laps = count_laps(run)
        for step in range(2):
            for module in (run.model, run.model.blocks[1]):
                if where.endswith("pre"):
                    handle = module.register_forward_pre_hook(hook_that_raises(module), prepend=" " in where)
                else:
                    handle = module.register_forward_hook(hook_that_raises(module), prepend=" " in where)
                with pytest.raises(OopsError):
                    run.loss(90 + step)
                handle.remove()
            run.train(step)
        # one that a hook stops before ours has run begins none
        assert run.engine is None or 2 <= len(laps) <= 6

    same(script, tmp_path)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_in_backward(place: int, recompute: bool, tmp_path: Path) -> None:
    """What arrived before it stays, as in a plain loop; `zero_grad` forgets it."""

    def script(run: Run) -> None:
        for step in range(3):
            handle = modules_of(run.model)[place].register_forward_hook(
                lambda module, args, output: output.register_hook(_oops) and None
            )
            loss = run.loss(90 + step)
            handle.remove()
            with pytest.raises(OopsError):
                loss.backward()
            if step != 1:
                run.optimizer.zero_grad()
            run.train(step)

    same(script, tmp_path, activations=outcore.Activations("recompute" if recompute else "keep"))


def _oops(gradient: torch.Tensor) -> None:
    raise OopsError


def test_in_one_of_two_backwards(tmp_path: Path) -> None:
    """No forward comes between the pass that fails and the next."""

    def script(run: Run) -> None:
        for step in range(3):
            handle = run.model.blocks[1].register_forward_hook(
                lambda module, args, output: output.register_hook(_oops) and None
            )
            first = run.loss(step)
            handle.remove()
            second = run.loss(step + 40)
            with pytest.raises(OopsError):
                first.backward()
            second.backward()
            run.step()
        run.train(5)

    same(script, tmp_path, tight="4MiB")


def test_in_recomputation(tmp_path: Path) -> None:
    """The block's forward raises the second time it is called."""
    with spread(
        budget=outcore.Budget(host="3MiB", disk=tmp_path), activations=outcore.Activations("recompute")
    ) as run:
        run.train(0)
        loss = run.loss(1)
        handle = run.model.blocks[1].up.register_forward_hook(hook_that_raises(None))
        with pytest.raises(OopsError):
            loss.backward()
        handle.remove()
        run.optimizer.zero_grad()
        run.train(1)
        assert run.engine is not None
        assert_idle(run.engine)


def test_step_after_backward_failed(tmp_path: Path) -> None:
    """A step right after a failed backward updates what has a gradient."""

    def script(run: Run) -> None:
        run.train(0)
        x = run.cast(floats(1))
        out = run.model.blocks[0](run.model.embed(x))
        out.register_hook(_oops)
        loss = run.model.head(run.model.blocks[2](run.model.blocks[1](out))).float().square().mean()
        with pytest.raises(OopsError):
            loss.backward()
        run.step()
        run.train(2)

    same(script, tmp_path)
