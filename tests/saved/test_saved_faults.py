"""A disk that fails while it takes or gives back activations: a typed error, and training goes on afterwards."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from engine.twin import adamw, assert_idle, floats
from exact.shapes import Stack
from faulty import Fault, FaultyFile, Kind, Operation, install
from outcore.errors import OutcoreError
from outcore.offloaded import engine_of

POINTS = 3
"""Operations of a sweep that fail, spread over all of a step."""

CASES: list[tuple[Operation, Kind]] = [
    ("read", "eio"),
    ("read", "flip"),
    ("write", "eio"),
    ("write", "enospc"),
    ("extend", "enospc"),
]


def passes(model: Any, optimizer: Any, seeds: range) -> list[float]:
    """Losses and norms of gradients; without steps, so that no update moves states meanwhile."""
    found = []
    for seed in seeds:
        loss = model(floats(seed, batch=4)).float().square().mean()
        loss.backward()
        found += [loss.item(), optimizer.clip_grad_norm_(1.0).item()]
        optimizer.zero_grad()
    return found


def trained(disk: Path, faults: list[Fault], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FaultyFile]:
    """Three passes under faults; after an error, with a disk that works, the same again."""
    with monkeypatch.context() as patch:
        files = install(patch, faults)
        torch.manual_seed(7)
        model = Stack(3)
        optimizer = adamw(model.parameters())
        budget = outcore.Budget(host="4200KiB", disk=disk)
        activations = outcore.Activations("offload")
        outcore.offload(model, optimizer, budget=budget, chunk_size="128KiB", activations=activations)
        (file,) = files
        try:
            left: Any
            try:
                left = passes(model, optimizer, range(3))
            except OutcoreError as error:
                left = type(error)
            if isinstance(left, type):
                gc.collect()  # a traceback and its frames hold each other, and the graph
                file.faults = ()
                optimizer.zero_grad()
                again = passes(model, optimizer, range(3))
                assert again == passes(model, optimizer, range(3))
            engine = engine_of(model)
            assert_idle(engine)
            assert engine.saver is not None
            # autograd itself keeps the graph of a backward that raised, and with it what that saved; but one at most
            still = [group for group in engine.saver._groups if group.alive()]
            assert len(still) <= (3 if isinstance(left, type) else 0)
            assert not any(chunk.pins for _, chunk in engine.saver._over)
        finally:
            outcore.release(model)
        return left, file


@pytest.mark.parametrize(("operation", "kind"), CASES)
def test_every_operation(
    operation: Operation, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, file = trained(tmp_path, [], monkeypatch)
    count = file.counts[operation]
    assert count > 0
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for k in range(min(POINTS, count)):
        at = 1 + k * (count - 1) // max(1, POINTS - 1)
        left, _ = trained(tmp_path, [Fault(operation, at, kind)], monkeypatch)
        assert left == expected or (isinstance(left, type) and issubclass(left, OutcoreError)), (at, left)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
