"""Back to the last checkpoint in the process in which training failed, whatever it failed of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import faulty
import outcore
from checkpoint.runs import STACK, TIGHT, offloaded, train, weights
from faulty import Fault, FaultyFile
from outcore.checkpoint import states
from outcore.errors import CorruptionError, OutcoreError, TierError
from outcore.memory.refusal import allocating, typed
from outcore.offloaded import engine_of
from outcore.optim.pipeline import Pipeline


@contextmanager
def saved(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any, FaultyFile]]:
    """A run with most of its states on disk, after a step that is saved and one that is not."""
    opened = faulty.install(patch)
    with offloaded(STACK, **TIGHT.settings(folder)) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        outcore.save(folder / "saved", model, optimizer)
        yield model, optimizer, opened[0]


def check_back(folder: Path, model: Any, optimizer: Any) -> None:
    """The checkpoint loads, and the steps after it are those that any run takes from there."""
    outcore.load(folder / "saved", model, optimizer)
    found = train(model, optimizer, STACK, range(1, 3))
    found.weights = weights(model)
    with offloaded(STACK) as (other, fresh):
        outcore.load(folder / "saved", other, fresh)
        expected = train(other, fresh, STACK, range(1, 3))
        expected.weights = weights(other)
    found.assert_equal(expected)


class OopsError(Exception):
    pass


@pytest.mark.parametrize("kind", [OopsError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_raised(
    where: str, kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that it left open are closed by whoever loads or saves, not only by the next forward."""

    def raising(*_: Any) -> None:
        raise kind

    with saved(tmp_path, monkeypatch) as (model, optimizer, _):
        block: torch.nn.Module = model.blocks[2]
        if where == "forward":
            handle = block.register_forward_pre_hook(raising)
        else:
            handle = block.register_full_backward_pre_hook(raising)
        with pytest.raises(kind):
            optimizer.backward(STACK.loss(model(**STACK.batch(1))))
        handle.remove()
        optimizer.zero_grad()
        outcore.save(tmp_path / "again", model, optimizer)
        check_back(tmp_path, model, optimizer)


def test_a_load_within_a_forward_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        outcore.load(tmp_path / "saved", model, optimizer)

    with saved(tmp_path, monkeypatch) as (model, optimizer, _):
        handle = model.blocks[1].up.register_forward_hook(load)
        with pytest.raises(outcore.errors.StateError, match="open"):
            model(**STACK.batch(1))
        handle.remove()
        check_back(tmp_path, model, optimizer)


def test_bytes_on_disk_that_are_damaged_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is about to be replaced need not be read."""
    with saved(tmp_path, monkeypatch) as (model, optimizer, file):
        file.faults = [Fault("write", file.counts["write"] + 1, "flip", forever=True)]
        with pytest.raises(CorruptionError):
            train(model, optimizer, STACK, range(1, 5))
        optimizer.zero_grad()
        file.faults = []
        check_back(tmp_path, model, optimizer)


def test_nothing_is_read_from_the_swap_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TIGHT.settings(tmp_path) | {"prefetch": False}
    opened = faulty.install(monkeypatch)
    with offloaded(STACK, **settings) as (model, optimizer):
        train(model, optimizer, STACK, range(2))
        outcore.save(tmp_path / "saved", model, optimizer)
        train(model, optimizer, STACK, range(2, 3))
        before = opened[0].counts["read"]
        outcore.load(tmp_path / "saved", model, optimizer)
        assert opened[0].counts["read"] == before
        outcore.load(tmp_path / "saved", model)  # moments stay: here they must be read
        assert opened[0].counts["read"] > before


def test_arithmetic_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update can't be done again, and is not asked for."""
    with saved(tmp_path, monkeypatch) as (model, optimizer, _):
        engine = engine_of(model)
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "_apply", lambda *_: [].pop())
            with pytest.raises(IndexError):
                train(model, optimizer, STACK, range(1, 3))
        optimizer.zero_grad()
        with pytest.raises(IndexError):
            engine.settle()
        check_back(tmp_path, model, optimizer)
        assert not engine.updates.pending()


def test_a_load_that_fails_midway_and_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with saved(tmp_path, monkeypatch) as (model, optimizer, _):
        with monkeypatch.context() as patch:
            part = states._parts

            def short(*args: Any) -> Any:
                for number, each in enumerate(part(*args)):
                    if number == 7:
                        raise MemoryError
                    yield each

            patch.setattr(states, "_parts", short)
            with pytest.raises(TierError, match=r"host memory for a checkpoint.*undefined"):
                outcore.load(tmp_path / "saved", model, optimizer)
        check_back(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(5, "Input/output error"), False),
        (RuntimeError("shapes differ"), False),
        (outcore.errors.BudgetError("host", 2, 1, "more"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_is_a_refusal_of_memory(error: BaseException, is_refusal: bool) -> None:
    told = typed(error, "a test")
    assert (told is not error) == is_refusal
    with pytest.raises(type(told)), allocating("a test"):
        raise error
    if is_refusal:
        assert isinstance(told, OutcoreError)
        assert "host memory for a test" in str(told)
        assert told.__cause__ is error
