"""Updates off the critical path: done before they are needed, by whoever comes first, and never twice."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

import outcore
from engine.twin import Run, adamw, floats, same, small
from outcore.chunks.core import Core
from outcore.engine import Engine
from outcore.errors import TierError
from outcore.memory.disk import DiskTier
from outcore.offloaded import engine_of
from outcore.optim.due import Update
from outcore.optim.pipeline import Pipeline


def offloaded(
    disk: Path, prefetch: bool = True, host: str = "64MiB"
) -> tuple[torch.nn.Module, outcore.Optimizer]:
    torch.manual_seed(0)
    model = small()
    optimizer = adamw(model.parameters())
    budget = outcore.Budget(host=host, disk=disk)
    outcore.offload(model, optimizer, budget=budget, prefetch=prefetch, chunk_size="128KiB")
    return model, optimizer


def train(model: torch.nn.Module, optimizer: outcore.Optimizer, seed: int = 0) -> float:
    loss = model(floats(seed)).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in outcore.weights(model)}


def updates(engine: Engine) -> list[Update]:
    assert engine.pipeline is not None
    return [update for found in engine.pipeline._updates.values() for update in found]


def test_a_step_returns_before_its_updates_are_done(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path, prefetch=False)
    train(model, optimizer)
    due = updates(engine_of(model))
    assert due
    assert not any(update.done for update in due)
    engine_of(model).settle()
    assert all(update.done for update in due)
    outcore.release(model)


def test_a_unit_is_up_to_date_when_it_is_used_and_the_others_can_wait(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path, prefetch=False)
    train(model, optimizer)
    engine = engine_of(model)
    due = updates(engine)
    first, last = engine.units[0], engine.units[-1]
    engine.residency.enter(first, "read")
    assert not engine.updates.is_due(first.stores)
    assert engine.updates.is_due(last.stores)
    engine.residency.leave(first)
    assert {update.done for update in due} == {True, False}
    outcore.release(model)


def test_the_thread_does_them_without_being_asked(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path)
    train(model, optimizer)
    pipeline = engine_of(model).pipeline
    assert pipeline is not None
    due = updates(engine_of(model))
    assert pipeline._thread is not None
    pipeline._thread.join()
    assert all(update.done for update in due)
    assert not any(update.ticked for update in due)  # nobody asked
    outcore.release(model)


def test_an_update_that_ends_after_its_tick_is_not_taken_for_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next step would not foresee it, and read its states when they are asked for."""
    model, optimizer = offloaded(tmp_path)
    train(model, optimizer)
    train(model, optimizer, 1)
    engine_of(model).settle()
    late: list[bool] = []

    def apply(pipeline: Pipeline, update: Update, original: object = Pipeline.apply) -> None:
        if threading.current_thread().name == "outcore-update" and not late:
            until = time.monotonic() + 20
            while not update.ticked and time.monotonic() < until:
                threading.Event().wait(0.001)
            late.append(update.ticked)
        original(pipeline, update)  # type: ignore[operator]

    monkeypatch.setattr(Pipeline, "apply", apply)
    train(model, optimizer, 2)
    model(floats(3))
    engine_of(model).settle()
    assert late == [True]
    assert not engine_of(model).clock._schedule._fulfilled
    outcore.release(model)


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_happens_between_a_step_and_the_next_forward(prefetch: bool, tmp_path: Path) -> None:
    """A new learning rate, zero_grad, reading, an evaluation, a second step: none reaches the step before."""

    def script(run: Run) -> None:
        for step in range(4):
            run.train(step)
            for group in run.optimizer.param_groups:
                group["lr"] *= 10.0
            run.optimizer.zero_grad()
            if step == 1:
                run.step()
            if step == 2:
                with torch.no_grad():
                    run.loss(50)
            for group in run.optimizer.param_groups:
                group["lr"] /= 10.0

    same(script, tmp_path, prefetch=prefetch)


def test_reading_and_state_are_those_after_the_step(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lazy, optimizer = offloaded(tmp_path / "a", prefetch=False)
    settled, other = offloaded(tmp_path / "b", prefetch=False)
    for seed in range(2):
        train(lazy, optimizer, seed)
        train(settled, other, seed)
        engine_of(settled).settle()
    assert updates(engine_of(lazy))
    state, expected = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert state.keys() == expected.keys()
    assert all(
        torch.equal(state[i][name], value) for i, found in expected.items() for name, value in found.items()
    )
    train(lazy, optimizer, 3)
    train(settled, other, 3)
    wanted = values(settled)
    found = values(lazy)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    outcore.release(lazy)
    outcore.release(settled)


def test_no_element_is_updated_twice_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int, str]] = []
    apply = Pipeline.apply

    def noted(self: Pipeline, update: Update) -> None:
        done.append((update.store.name, update.k, threading.current_thread().name))
        apply(self, update)

    monkeypatch.setattr(Pipeline, "apply", noted)
    model, optimizer = offloaded(tmp_path, host="3MiB")
    for step in range(6):
        done.clear()
        train(model, optimizer, step)
        engine = engine_of(model)
        due = {(u.store.name, u.k) for u in updates(engine)} | {(name, k) for name, k, _ in done}
        engine.settle()
        assert len(done) == len(due)
        assert {(name, k) for name, k, _ in done} == due
    outcore.release(model)


def test_a_model_that_is_dropped_takes_the_thread_with_it(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path)
    train(model, optimizer)
    engine = weakref.ref(engine_of(model))
    del model, optimizer
    deadline = time.monotonic() + 20
    while engine() is not None and time.monotonic() < deadline:
        gc.collect()
    assert engine() is None


def test_release_with_updates_due(tmp_path: Path) -> None:
    for prefetch in (True, False):
        model, optimizer = offloaded(tmp_path, prefetch=prefetch)
        train(model, optimizer)
        outcore.release(model)
        assert not any(thread.name == "outcore-update" for thread in threading.enumerate() if thread.daemon)


def test_a_read_that_fails_on_the_thread_is_raised_where_the_model_is_used_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model, optimizer = offloaded(tmp_path / "a", host="3MiB")
    twin, other = offloaded(tmp_path / "b", host="3MiB")
    for step in range(3):
        train(model, optimizer, step)
        train(twin, other, step)
    engine = engine_of(model)
    model(floats(3)).float().square().mean().backward()
    engine.pool.quiesce()
    read = DiskTier.read

    def broken(self: DiskTier, *args: object) -> object:
        if self is engine.disk:
            raise TierError("the disk is out of order")
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "read", broken)
    optimizer.step()
    assert engine.pipeline is not None
    assert engine.pipeline._thread is not None
    engine.pipeline._thread.join()
    with pytest.raises(TierError, match="out of order"):
        engine.settle()
    monkeypatch.undo()
    engine.settle()
    train(twin, other, 3)
    expected = values(twin)
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())
    outcore.release(model)
    outcore.release(twin)


@pytest.mark.timeout(60)
def test_a_thread_that_never_finds_room_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread does the updates itself; the thread of one step doesn't wait on for those of the next."""
    monkeypatch.setattr(Core, "enter", lambda self, chunks, beyond, claim: False)
    model, optimizer = offloaded(tmp_path)
    for step in range(3):
        train(model, optimizer, step)
    outcore.release(model)


def test_what_the_thread_waits_for_keeps_the_training_thread_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither counted as a wait, nor taken from the time of the updates."""
    model, optimizer = offloaded(tmp_path)
    ledger, do_beside = engine_of(model).ledger, Pipeline.do_beside
    there = []

    def waiting(pipeline: Pipeline, update: Update, *beyond: int) -> None:
        with ledger.waiting("device in"):  # a link that nobody else here waits for
            there.append(threading.current_thread().name)
        do_beside(pipeline, update, *beyond)

    monkeypatch.setattr(Pipeline, "do_beside", waiting)
    for step in range(2):
        train(model, optimizer, step)
    engine_of(model).settle()
    assert set(there) == {"outcore-update"}
    assert ledger.snapshot().waited["device in"] == 0.0
    with ledger.waiting("device in"):
        pass
    assert ledger.snapshot().waited["device in"] > 0.0
    outcore.release(model)


def test_updates_that_would_not_fit_beside_a_forward_are_done_in_the_step(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path, prefetch=False)
    engine = engine_of(model)
    train(model, optimizer)
    assert updates(engine)
    engine._largest_update = engine.pool.floor  # twice that is more than there is
    train(model, optimizer)
    assert not updates(engine)
    outcore.release(model)


@pytest.mark.parametrize("prefetch", [True, False])
def test_arithmetic_that_raises_is_reported_and_not_done_again(
    prefetch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = offloaded(tmp_path, prefetch=prefetch)

    def broken(*args: object) -> None:
        raise ArithmeticError("no numbers")

    monkeypatch.setattr(Pipeline, "_apply", broken)
    train(model, optimizer)
    engine = engine_of(model)
    assert engine.pipeline is not None
    if engine.pipeline._thread is not None:
        engine.pipeline._thread.join()
    with pytest.raises(ArithmeticError, match="no numbers"):
        engine.settle()
    monkeypatch.undo()
    with pytest.raises(ArithmeticError, match="no numbers"):
        engine.settle()
    outcore.release(model)
