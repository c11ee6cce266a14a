"""Offloaded activations never change the result: every shape, over budgets, ways and read-ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import outcore
from exact.families import FAMILIES
from exact.reference import Loop, in_memory, offloaded
from exact.shapes import SHAPES, Shape

SOON = ("twice", "attention", "dropout", "gpt2")
"""Shapes of the default run; the others take minutes together."""

ALL = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=[] if shape.name in SOON else [pytest.mark.slow])
        for shape in SHAPES + FAMILIES
    ],
    ids=lambda shape: shape.name,
)


def adamw(params: Any) -> outcore.AdamW:
    return outcore.AdamW(params, lr=1e-2, weight_decay=0.1)


@ALL
@pytest.mark.parametrize("way", ["offload", "recompute+offload"])
def test_ways(shape: Shape, way: Any, tmp_path: Path) -> None:
    loop = Loop(accumulate=2, clip=0.5)
    expected = in_memory(shape, loop, adamw)
    for host, prefetch in (("12MiB", True), ("12MiB", False), ("1GiB", True)):
        offloaded(
            shape,
            loop,
            adamw,
            budget=outcore.Budget(host=host, disk=tmp_path),
            activations=outcore.Activations(way),
            chunk_size="128KiB",
            prefetch=prefetch,
        ).assert_equal(expected)
