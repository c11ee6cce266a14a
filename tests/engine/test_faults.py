"""Every disk operation of two training steps fails once, or from then on: a typed error or the same result."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from engine.twin import adamw
from exact.shapes import Stack
from faulty import KINDS, Fault, FaultyFile, Kind, Operation, install
from outcore.errors import OutcoreError
from outcore.offloaded import engine_of

HOST = "2MiB"
CHUNK = "128KiB"  # 64 Ki elements in bf16


def outcome(disk: Path, faults: list[Fault], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[FaultyFile]]:
    """Two steps: what they left, or the class of the error."""
    with monkeypatch.context() as patch:
        files = install(patch, faults)
        torch.manual_seed(7)
        model = Stack(2)
        optimizer = adamw(model.parameters())
        left: Any
        chunks: list[Any] = []
        try:
            outcore.offload(model, optimizer, budget=outcore.Budget(host=HOST, disk=disk), chunk_size=CHUNK)
            chunks = [c for u in engine_of(model).units for s in u.stores for c in s.chunks()]
            losses = []
            for step in range(2):
                x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step))
                loss = model(x).float().square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            left = losses, {name: value.clone() for name, value in outcore.weights(model)}
        except OutcoreError as error:
            left = type(error)
        finally:
            outcore.release(model)
        assert all(chunk.pins == 0 for chunk in chunks)
        assert all(file.closed for file in files)
    return left, files


def is_same(left: Any, right: Any) -> bool:
    return left[0] == right[0] and all(torch.equal(value, right[1][name]) for name, value in left[1].items())


SWEEPS = [
    (operation, kind, forever)
    for operation, kinds in KINDS.items()
    for kind in kinds
    for forever in (False, True)
    if not (kind == "eintr" and forever)  # an interrupted call is made again, as often as it takes
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("operation", "kind", "forever"), SWEEPS)
def test_every_operation(
    operation: Operation, kind: Kind, forever: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 sweeps of up to `POINTS` evenly spread operations each, the first and the last among them."""
    expected, files = outcome(tmp_path, [], monkeypatch)
    count = files[0].counts[operation]
    assert count > 0
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    points = min(POINTS, count)
    for k in range(points):
        at = 1 + k * (count - 1) // max(1, points - 1)
        left, _ = outcome(tmp_path, [Fault(operation, at, kind, forever)], monkeypatch)
        assert isinstance(left, type) or is_same(left, expected), at
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


POINTS = 12
