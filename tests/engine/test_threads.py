"""One model called on several threads: forwards come one after the other, and none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from engine.twin import assert_idle, floats, spread
from outcore.errors import StateError
from outcore.model import turns

SOON = 120.0


class StopError(BaseException):
    """As Ctrl-C: torch calls no hooks."""


def evaluated(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(x)
    return found


def test_a_second_thread_waits_for_the_first(tmp_path: Path) -> None:
    with (
        spread(precision="fp32", budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        x = floats(0)
        expected = evaluated(run.model, x)
        assert run.engine is not None
        changed = run.engine.laps._turn._changed
        waits, wait = threading.Event(), changed.wait

        def noted(timeout: float | None = None) -> bool:
            waits.set()
            return wait(timeout)

        changed.wait = noted  # type: ignore[method-assign]
        others: list[Future[torch.Tensor]] = []

        def meanwhile(*args: object) -> None:
            if not others:  # the other thread comes by here, too
                others.append(pool.submit(evaluated, run.model, x))
                assert waits.wait(SOON)

        run.model.blocks[1].register_forward_pre_hook(meanwhile)
        assert torch.equal(evaluated(run.model, x), expected)
        assert torch.equal(others[0].result(SOON), expected)
        assert_idle(run.engine)


@pytest.mark.parametrize("kind", [ZeroDivisionError, StopError])
def test_a_forward_that_ended_early_keeps_no_turn(kind: type[BaseException], tmp_path: Path) -> None:
    with (
        spread(precision="fp32", budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        x = floats(0)
        expected = evaluated(run.model, x)

        def stop(*args: object) -> None:
            raise kind

        handle = run.model.blocks[1].register_forward_pre_hook(stop)
        with pytest.raises(kind):
            evaluated(run.model, x)
        handle.remove()
        assert torch.equal(pool.submit(evaluated, run.model, x).result(SOON), expected)


def test_a_forward_that_waits_for_another_thread_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    monkeypatch.setattr(turns, "LOOK", 0.01)
    with (
        spread(precision="fp32", budget=outcore.Budget(host="3MiB", disk=tmp_path)) as run,
        ThreadPoolExecutor(1) as pool,
    ):
        x = floats(0)
        expected = evaluated(run.model, x)
        found: list[Callable[..., Any]] = []

        def elsewhere(*args: object) -> None:
            with pytest.raises(StateError, match="stands still"):
                pool.submit(evaluated, run.model.head, torch.zeros(1, 160)).result(SOON)
            found.append(elsewhere)

        handle = run.model.blocks[1].register_forward_pre_hook(elsewhere)
        assert torch.equal(evaluated(run.model, x), expected)
        handle.remove()
        assert found
