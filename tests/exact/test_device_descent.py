"""Gradients that come down chunk by chunk, where the host has no room for two chunks on their way."""

from __future__ import annotations

from pathlib import Path

import pytest

import outcore
from exact.devices import Device
from exact.reference import Loop, offloaded
from exact.shapes import SHAPES, built
from exact.test_device import on_device
from exact.test_matrix import adamw
from outcore.chunks.pool import Guard
from outcore.chunks.store import RunStore
from outcore.errors import DiskFullError
from outcore.offloaded import engine_of
from outcore.optim.gradients import Gradients
from outcore.planning.minimum import needs

SHAPE, CHUNK = SHAPES[0], "256KiB"


def least_host(device: Device, disk: Path) -> int:
    """Bytes of the host that training needs; a block's parameters are two chunks."""
    model = built(SHAPE)
    budget = outcore.Budget(device="16MiB", host="64MiB", disk=disk)
    optimizer = adamw(model.parameters())
    outcore.offload(model, optimizer, device=device.name, budget=budget, chunk_size=CHUNK, precision="fp32")
    engine = engine_of(model)
    found = needs(engine.units, engine.points, False)
    runs = [store.run for unit in engine.units for store in unit.stores]
    outcore.release(model)
    split = [run for run in runs if run.chunks == 2]
    assert split
    assert all(run.nbytes > found.working // 4 for run in split)  # its copies can't be on their way together
    return found.working


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_piece_lands_before_the_last_is_sent(
    accumulate: int, device: Device, tmp_path: Path
) -> None:
    """The buffer on the device stays until both have landed; the second pass adds to what is there."""
    least = least_host(device, tmp_path)
    loop = Loop(precision="fp32", steps=2, accumulate=accumulate)
    budget = outcore.Budget(device="16MiB", host="1GiB")
    roomy = offloaded(SHAPE, loop, adamw, device=device.name, budget=budget, chunk_size=CHUNK)
    roomy.assert_equal(device.reference(SHAPE, loop, adamw))
    on_device(SHAPE, loop, tmp_path, device, "16MiB", f"{least}", chunk_size=CHUNK).assert_equal(roomy)
    device.check()


@pytest.mark.parametrize("at", [0, 1])
def test_what_can_t_be_sent_leaves_the_device(
    at: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when a chunk is to come for one of the pieces: their buffer goes all the same."""
    open_first = Gradients.open_first

    def refused(gradients: Gradients, store: RunStore, k: int, wide: bool) -> Guard | None:
        if store.run.chunks == 2 and k == at:
            raise DiskFullError("no space left")
        return open_first(gradients, store, k, wide)

    model = built(SHAPE)
    optimizer = adamw(model.parameters())
    budget = outcore.Budget(device="16MiB", host="64MiB", disk=tmp_path)
    outcore.offload(model, optimizer, device=device.name, budget=budget, chunk_size=CHUNK, precision="fp32")
    loss = SHAPE.loss(model(**SHAPE.batch(0)))
    monkeypatch.setattr(Gradients, "open_first", refused)
    with pytest.raises(DiskFullError):
        optimizer.backward(loss)
    optimizer.zero_grad()
    assert outcore.snapshot(model).kinds["device"].get("gradients", 0) == 0
    outcore.release(model)
