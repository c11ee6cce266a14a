"""Resuming on three tiers of a device, its generator and frozen weights included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outcore
from checkpoint.runs import offloaded, seed_all, train, weights
from exact.devices import Device
from exact.shapes import SHAPES, Shape


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_resume(shape: Shape, device: Device, tmp_path: Path) -> None:
    roomy = dict(budget=outcore.Budget(device="1GiB", host="1GiB"), device=device.name)
    tight = dict(
        budget=outcore.Budget(device="8MiB", host="14MiB", disk=tmp_path),
        chunk_size="128KiB",
        device=device.name,
    )
    seed_all(11)
    with offloaded(shape, **tight) as (model, optimizer):
        train(model, optimizer, shape, range(2))
        outcore.save(tmp_path / "saved", model, optimizer)
        expected = train(model, optimizer, shape, range(2, 4))
        expected.weights = weights(model)
        # back in the same model, whose device holds copies of what came later
        outcore.load(tmp_path / "saved", model, optimizer)
        assert train(model, optimizer, shape, range(2, 4)).losses == expected.losses
    for settings in (roomy, tight):
        seed_all(99)
        with offloaded(shape, seed=8, **settings) as (model, optimizer):
            with torch.no_grad():
                model(**shape.batch(1))  # copies of the first weights are on the device
            outcore.load(tmp_path / "saved", model, optimizer)
            found = train(model, optimizer, shape, range(2, 4))
            found.weights = weights(model)
            found.assert_equal(expected)
