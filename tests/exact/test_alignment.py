"""Parameters lie where an allocator would put them, as far as kernels look."""

from __future__ import annotations

import outcore
from exact.families import FAMILIES
from exact.shapes import SHAPES, Shape, built
from outcore.offloaded import engine_of

SEEN = 256
"""Bytes: torch tells cuBLASLt an operand's alignment up to here, and the choice of an algorithm may hang on it."""


def test_kernels_see_the_alignment_that_they_see_in_memory() -> None:
    """A device's frames start at an allocator's boundary, so what counts is the offset within the run."""

    def misaligned(shape: Shape) -> list[str]:
        model = built(shape)
        outcore.offload(model, budget=outcore.Budget(host="1GiB"), device="cpu")
        bindings = [binding for unit in engine_of(model).units for binding in unit.bindings]
        found = [b.name for b in bindings if b.slot.offset * b.store.run.dtype.itemsize % SEEN]
        outcore.release(model)
        return found

    assert not [name for shape in (SHAPES[0], FAMILIES[0]) for name in misaligned(shape)]
