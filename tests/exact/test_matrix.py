"""Placement never changes the result: every shape, over budgets, prefetch, accumulation and clipping."""

from __future__ import annotations

from pathlib import Path

import pytest
from exact.reference import Loop, in_memory, offloaded
from exact.shapes import SHAPES, Shape

import outcore


def adamw(params: object) -> outcore.AdamW:
    return outcore.AdamW(params, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_matrix(shape: Shape, accumulate: int, clip: float | None, tmp_path: Path) -> None:
    loop = Loop(accumulate=accumulate, clip=clip)
    expected = in_memory(shape, loop, adamw)
    offloaded(shape, loop, adamw, budget=outcore.Budget(host="1GiB")).assert_equal(expected)
    for prefetch in (True, False):
        for host in ("9MiB", "40MiB"):
            offloaded(
                shape,
                loop,
                adamw,
                budget=outcore.Budget(host=host, disk=tmp_path),
                chunk_size="128KiB",
                prefetch=prefetch,
            ).assert_equal(expected)
