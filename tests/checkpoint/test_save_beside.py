"""Saving while training goes on: the same files as a save that everything waits for, and the same training."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from checkpoint.runs import (
    DROPOUT,
    MEMORY,
    MIDDLE,
    STACK,
    TIGHT,
    Where,
    adamw,
    offloaded,
    seed_all,
    train,
    weights,
)
from checkpoint.test_resume import OPTIMIZERS
from exact.devices import Device
from exact.families import FAMILIES
from exact.reference import Result
from exact.shapes import SHAPES, Shape, built
from outcore.checkpoint import files as seam
from outcore.checkpoint import pieces
from outcore.checkpoint import saving as saving_module
from outcore.checkpoint.files import Files
from outcore.checkpoint.flow import Flow
from outcore.checkpoint.saving import Saving
from outcore.offloaded import engine_of

pytestmark = pytest.mark.filterwarnings("ignore:step skipped")

STEPS = 4


class Late(Files):
    """Writes take a random while, so that training comes upon chunks that are not saved."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        time.sleep(self._chance.choice((0, 0, 0, 0.001)))
        return super().write(fd, view, offset)


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes nothing: updates hand over every chunk."""
    monkeypatch.setattr(Saving, "_write_beside", lambda *_: time.sleep(0.01))


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "SYSTEM", Late(3))


def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


WRITERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {"prompt": prompt, "late": late, "absent": absent}


def content(folder: Path) -> dict[str, bytes]:
    return {place.name: place.read_bytes() for place in sorted(folder.iterdir())}


def saved(
    folder: Path,
    wait: bool,
    shape: Shape,
    make: Callable[[Any], outcore.Optimizer],
    precision: str,
    loop: Callable[..., Any] = train,
    **settings: Any,
) -> Result:
    """A run that saves after each step."""
    seed_all(11)
    folder.mkdir()
    result = Result()
    with offloaded(shape, make, precision, **settings) as (model, optimizer):
        for step in range(STEPS):
            loop(model, optimizer, shape, range(step, step + 1), result)
            if step < STEPS - 1:
                outcore.save(folder / f"{step}", model, optimizer, extra={"step": step}, wait=wait)
        result.weights = weights(model)
        limit = outcore.snapshot(model)
        assert limit.peak["host"] <= limit.budget["host"]
    return result


def check(
    folder: Path,
    shape: Shape,
    make: Callable[[Any], outcore.Optimizer] = adamw,
    precision: str = "bf16",
    loop: Callable[..., Any] = train,
    **settings: Any,
) -> None:
    """Both ways to save give the same files, and the same training."""
    expected = saved(folder / "waited", True, shape, make, precision, loop, **settings)
    found = saved(folder / "beside", False, shape, make, precision, loop, **settings)
    found.assert_equal(expected)
    for step in range(STEPS - 1):
        one, other = content(folder / "waited" / f"{step}"), content(folder / "beside" / f"{step}")
        assert one.keys() == other.keys()
        assert [name for name in one if one[name] != other[name]] == []
    assert sorted(os.listdir(folder / "beside")) == [f"{step}" for step in range(STEPS - 1)]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)
def test_shapes(shape: Shape, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "FILE_BYTES", 400_000)
    WRITERS[writer](monkeypatch)
    check(tmp_path, shape, **TIGHT.settings(tmp_path))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("where", [MEMORY, MIDDLE], ids=["memory", "middle"])
def test_places(
    where: Where, prefetch: bool, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[writer](monkeypatch)
    check(tmp_path, DROPOUT, prefetch=prefetch, **where.settings(tmp_path))


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    check(tmp_path, STACK, OPTIMIZERS[name], precision, **TIGHT.settings(tmp_path))


def accumulating(model: Any, optimizer: Any, shape: Shape, steps: range, result: Result) -> None:
    for step in steps:
        for part in range(3):
            loss = shape.loss(model(**shape.batch(100 * step + part)))
            optimizer.backward(loss / 3)
            result.losses.append(loss.item())
        result.norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("writer", WRITERS)
def test_accumulation(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS[writer](monkeypatch)
    check(tmp_path, STACK, loop=accumulating, **TIGHT.settings(tmp_path))


class Alternating(torch.nn.Module):
    """Every other step leaves the first half of each run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(300, 300)) for _ in range(6))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        for part in list(self.parts)[3 * (self.turn % 2) :]:
            x = x + (x @ part.to(x.dtype)).tanh()
        return x


@pytest.mark.parametrize("host", ["1GiB", "6MiB"])
@pytest.mark.parametrize("writer", WRITERS)
def test_chunks_that_are_passed_over(
    writer: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update whose run has earlier chunks that are not saved and that nobody updates."""
    WRITERS[writer](monkeypatch)
    batch = {"x": torch.randn(4, 300, generator=torch.Generator().manual_seed(5))}
    shape = Shape("alternating", Alternating, lambda seed: batch, lambda y: y.float().square().mean())
    budget = outcore.Budget(host=host, disk=tmp_path)
    check(tmp_path, shape, chunk_size="128KiB", budget=budget)


@pytest.mark.parametrize("shape", [STACK, DROPOUT], ids=lambda shape: shape.name)
@pytest.mark.parametrize("writer", WRITERS)
def test_device(
    writer: str, shape: Shape, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[writer](monkeypatch)
    budget = outcore.Budget(device="8MiB", host="14MiB", disk=tmp_path)
    check(tmp_path, shape, budget=budget, chunk_size="128KiB", device=device.name)
    device.check()


# -- who waits for it -----------------------------------------------------------------------------


class Gate(Files):
    """Nothing is made durable until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def sync(self, fd: int) -> None:
        assert self.opened.wait(30)
        super().sync(fd)

    def later(self) -> None:
        threading.Timer(0.2, self.opened.set).start()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    found = Gate()
    monkeypatch.setattr(seam, "SYSTEM", found)
    return found


def test_a_save_returns_before_it_is_committed_and_training_goes_on(gate: Gate, tmp_path: Path) -> None:
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        train(model, optimizer, STACK, range(1, 3))
        assert not saving.done
        assert not (tmp_path / "one").exists()
        gate.opened.set()
        saving.wait()
        assert saving.done
        saving.wait()
        assert outcore.verify(tmp_path / "one").optimizer is not None


def waits(act: Callable[[Any, Any, Path], object], gate: Gate, tmp_path: Path) -> None:
    with offloaded(STACK) as (model, optimizer):
        train(model, optimizer, STACK, range(1))
        saving = outcore.save(tmp_path / "one", model, optimizer, extra=5, wait=False)
        train(model, optimizer, STACK, range(1, 2))
        gate.later()
        assert not saving.done
        act(model, optimizer, tmp_path)
        assert saving.done
        outcore.verify(tmp_path / "one")


WAITING: dict[str, Callable[[Any, Any, Path], object]] = {
    "save": lambda model, optimizer, folder: outcore.save(folder / "two", model, optimizer),
    "load": lambda model, optimizer, folder: outcore.load(folder / "one", model, optimizer),
    "verify": lambda model, optimizer, folder: outcore.verify(folder / "one"),
    "to_dcp": lambda model, optimizer, folder: outcore.to_dcp(folder / "one", folder / "dcp"),
    "release": lambda model, optimizer, folder: outcore.release(model),
    "restore": lambda model, optimizer, folder: outcore.Checkpoints(folder).restore(model, optimizer),
}


@pytest.mark.parametrize("name", WAITING)
def test_who_waits(name: str, gate: Gate, tmp_path: Path) -> None:
    waits(WAITING[name], gate, tmp_path)


def test_export_and_weights_are_those_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    found = []
    for wait in (True, False):
        with offloaded(STACK, **TIGHT.settings(tmp_path)) as (model, optimizer):
            train(model, optimizer, STACK, range(2))
            saving = outcore.save(tmp_path / f"saved-{wait}", model, optimizer, wait=wait)
            train(model, optimizer, STACK, range(2, 3))
            values = weights(model)
            outcore.export(model, tmp_path / f"exported-{wait}", "fp32")
            saving.wait()
            found.append(
                (values, content(tmp_path / f"exported-{wait}"), content(tmp_path / f"saved-{wait}"))
            )
    assert all(torch.equal(found[0][0][name], value) for name, value in found[1][0].items())
    assert found[0][1:] == found[1][1:]


def test_a_series_waits_for_its_newest(gate: Gate, tmp_path: Path) -> None:
    checkpoints = outcore.Checkpoints(tmp_path, keep=1)
    with offloaded(STACK) as (model, optimizer):
        gate.opened.set()
        checkpoints.save(1, model, optimizer)
        checkpoints.wait()
        gate.opened.clear()
        checkpoints.save(2, model, optimizer)
        assert os.path.exists(tmp_path / "step-1")
        gate.later()
        assert checkpoints.steps() == [2]
        assert checkpoints.latest() == tmp_path / "step-2"
        checkpoints.wait()


@contextmanager
def left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patience: float, **settings: Any
) -> Iterator[tuple[Any, Any, int]]:
    """A run that stopped stepping, with what it had read from disk by then.

    All that is on the host seems to be needed sooner than what is not, as it is where the last tick's chunks alone are
    needed later: they stay until the next tick, which never comes.
    """
    monkeypatch.setattr(saving_module, "PATIENCE", patience)
    monkeypatch.setattr(saving_module, "WATCH", 0.001)
    settings = TIGHT.settings(folder) | settings
    with offloaded(STACK, **settings) as (model, optimizer):
        train(model, optimizer, STACK, range(4))
        engine = engine_of(model)
        if settings.get("prefetch", True):
            engine.settle()
            engine.pool.quiesce()
        monkeypatch.setattr(engine.pool._core._order, "next_use", lambda chunk: 1 if chunk.on_host else 2)
        yield model, optimizer, outcore.snapshot(model).moved["disk read"]


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_save_ends_by_itself_where_no_step_follows(
    prefetch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not on the host is read, and without a thread for updates those that are due are done."""
    with left_alone(tmp_path, monkeypatch, 0.0, prefetch=prefetch) as (model, optimizer, before):
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        assert saving._over.wait(60)
        assert outcore.snapshot(model).moved["disk read"] > before
        saving.wait()
        expected = weights(model)
        outcore.save(tmp_path / "two", model, optimizer)
        assert content(tmp_path / "one") == content(tmp_path / "two")
        outcore.load(tmp_path / "one", model, optimizer)
        assert all(torch.equal(value, expected[name]) for name, value in weights(model).items())


def test_a_save_is_patient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read for it while an update may still bring it."""
    looks = threading.Semaphore(0)
    choose = Saving._choose

    def counted(self: Saving, flow: Flow, at_rest: bool) -> Any:
        found = choose(self, flow, at_rest)
        if not found[1]:
            looks.release()
        return found

    monkeypatch.setattr(Saving, "_choose", counted)
    with left_alone(tmp_path, monkeypatch, 3600.0) as (model, optimizer, before):
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        for _ in range(30):
            assert looks.acquire(timeout=60)
        assert not saving.done
        assert outcore.snapshot(model).moved["disk read"] == before
    outcore.verify(tmp_path / "one")


@pytest.mark.filterwarnings("error")
def test_the_save_of_a_model_that_is_dropped_is_committed(tmp_path: Path) -> None:
    shape = STACK
    model = built(shape, 7)
    optimizer = adamw(model.parameters())
    outcore.offload(model, optimizer, budget=outcore.Budget(host="1GiB"))
    train(model, optimizer, shape, range(1))
    saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
    engine = weakref.ref(engine_of(model))
    del model, optimizer
    deadline = time.monotonic() + 30
    while engine() is not None and time.monotonic() < deadline:
        time.sleep(0.05)  # a collection holds the interpreter, which the threads need
        gc.collect()
    assert saving.done
    assert engine() is None
    outcore.verify(tmp_path / "one")


def test_no_thread_stays_and_the_model_can_be_dropped(tmp_path: Path) -> None:
    with offloaded(STACK) as (model, optimizer):
        saving = outcore.save(tmp_path / "one", model, optimizer, wait=False)
        saving.wait()
        engine = weakref.ref(engine_of(model))
        outcore.release(model)
    del model, optimizer
    gc.collect()
    assert engine() is None
    assert saving.done
    assert not any(thread.name == "outcore-save" for thread in threading.enumerate())
