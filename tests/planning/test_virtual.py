"""The layout of a plan is that of a run."""

from __future__ import annotations

import pytest

import outcore
from exact.families import FAMILIES
from exact.shapes import Shape
from outcore.chunks.store import RunStore
from outcore.memory.sizes import parse_size
from outcore.offloaded import engine_of
from outcore.planning.subject import Subject

CHUNK = "64KiB"


def told(store: RunStore) -> object:
    """All that there is to say of a run's chunks, but for where they lie."""
    kinds = (store.parameters, store.gradients, store.totals, store.states)
    chunks = [[(chunk.kind, chunk.name, chunk.nbytes) for chunk in kind] for kind in kinds]
    return store.name, store.run, chunks, store.totals is store.gradients, store.planes, store.written


@pytest.mark.parametrize("frozen_too", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", FAMILIES, ids=lambda shape: shape.name)
def test_a_plan_lays_out_what_a_run_does(shape: Shape, precision: str, frozen_too: bool) -> None:
    """Whether or not the optimizer holds what is frozen, as loops for adapters do."""
    model = shape.build().train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    optimizer = outcore.AdamW(p for p in model.parameters() if p.requires_grad or frozen_too)
    wanted = outcore.Precision(precision)  # type: ignore[arg-type]
    planned, _ = Subject(model, optimizer, shape.batch(0), precision=wanted).layout(parse_size(CHUNK))
    outcore.offload(
        model, optimizer, budget=outcore.Budget(host="256MiB"), precision=wanted, chunk_size=CHUNK
    )
    try:
        units = engine_of(model).units
        assert [unit.name for unit in planned] == [unit.name for unit in units]
        for ours, there in zip(planned, units, strict=True):
            assert [told(store) for store in ours.stores] == [told(store) for store in there.stores]
    finally:
        outcore.release(model)
