"""The placement in words, from snapshots of a model that trains."""

from __future__ import annotations

from pathlib import Path

import torch

import outcore
from exact.shapes import SHAPES, built
from outcore.memory.ledger import Snapshot
from outcore.report.placement import placement, since

MiB = 1 << 20


def test_it_names_what_lies_where_and_what_moves() -> None:
    kinds = {"host": {"parameters": 3 * MiB, "gradients": 0}, "disk": {"optimizer states": 9 * MiB}}
    before, now = (
        Snapshot({}, {}, {}, {"disk read": moved, "device in": 0}, {}, {}, kinds)
        for moved in (5, 5 + 2 * MiB)
    )
    assert placement(now, since(before, now), "step") == (
        "placement: host parameters 3.0 MiB; disk optimizer states 9.0 MiB; a step moves disk read 2.0 MiB"
    )
    assert placement(now, {}, "pass").endswith("a pass moves nothing")


def test_kinds_that_are_crumbs_of_their_tier_are_not_named() -> None:
    kinds = {
        "host": {"parameters": 999, "other": 1, "gradients": 0},
        "device": {"parameters": 9999, "other": 9},
    }
    said = placement(Snapshot({}, {}, {}, {}, {}, {}, kinds), {}, "step")
    assert (
        said == "placement: device parameters 9.8 KiB; host parameters 999 B, other 1 B; a step moves nothing"
    )


def test_kinds_add_up_to_what_each_tier_holds(tmp_path: Path) -> None:
    shape = SHAPES[0]
    torch.manual_seed(0)
    model = built(shape)
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(
        model, optimizer, budget=outcore.Budget(host="4MiB", disk=tmp_path), chunk_size="128KiB", device="cpu"
    )
    try:
        for step in range(2):
            shape.loss(model(**shape.batch(step))).backward()
            optimizer.step()
        now = outcore.snapshot(model)
    finally:
        outcore.release(model)
    assert now.kinds["host"]["parameters"] > 0
    assert now.kinds["disk"]["optimizer states"] > 0
    for tier, kinds in now.kinds.items():
        assert sum(kinds.values()) == now.held[tier]
