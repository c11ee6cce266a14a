"""A model that is released, dropped, or could not be offloaded: nothing is left, and its optimizer says so."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.shapes import Stack
from outcore.chunks.pool import Pool
from outcore.errors import StateError
from outcore.memory.disk import DiskTier
from outcore.model.laps import Laps
from outcore.model.stage import HostStage
from outcore.offloaded import engine_of


def offloaded(disk: Path) -> tuple[nn.Module, outcore.AdamW]:
    torch.manual_seed(0)
    model = Stack(2)
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(
        model, optimizer, budget=outcore.Budget(host="2MiB", disk=disk), chunk_size="128KiB", device="cpu"
    )
    return model, optimizer


def trained(model: nn.Module, optimizer: outcore.AdamW) -> None:
    model(torch.ones(2, 4, 32)).float().square().mean().backward()
    optimizer.step()


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("outcore"))


ACTS: dict[str, Callable[[Any], object]] = {
    "step": lambda optimizer: optimizer.step(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("how", ["released", "dropped"])
def test_an_optimizer_without_its_model_says_so(how: str, act: str, tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path)
    trained(model, optimizer)
    if how == "released":
        outcore.release(model)
    del model
    gc.collect()
    with pytest.raises(StateError, match="was released or is gone"):
        ACTS[act](optimizer)


def test_an_optimizer_that_is_kept_keeps_no_files_and_no_threads(tmp_path: Path) -> None:
    before = ours()
    model, optimizer = offloaded(tmp_path)
    trained(model, optimizer)
    engine = weakref.ref(engine_of(model))
    assert ours() != before
    del model
    gc.collect()
    assert engine() is None
    assert ours() == before
    assert len(optimizer.parameters()) > 0


@pytest.mark.parametrize(("kind", "name"), [(HostStage, "shut"), (Pool, "close"), (Laps, "remove")])
def test_what_can_not_be_shut_keeps_nothing_else_open(
    kind: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ours()
    monkeypatch.setattr(kind, name, lambda self: 1 / 0)
    model, optimizer = offloaded(tmp_path)
    trained(model, optimizer)
    engine = engine_of(model)
    with pytest.raises(ZeroDivisionError):
        outcore.release(model)
    assert ours() == before
    assert engine.disk is not None
    with pytest.raises(StateError):
        engine.disk.allocate(4096, "x", "y")
    with pytest.raises(StateError, match="was released"):
        model(torch.ones(2, 4, 32))
    with pytest.raises(StateError, match="was released"):
        optimizer.step()


def test_an_engine_that_can_not_be_made_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, closed = ours(), []
    close = DiskTier.close

    def noted(disk: DiskTier) -> None:
        closed.append(disk)
        close(disk)

    monkeypatch.setattr(DiskTier, "close", noted)
    monkeypatch.setattr(Pool, "__init__", lambda self, *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offloaded(tmp_path)
    assert len(closed) == 1
    assert ours() == before
