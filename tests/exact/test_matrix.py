"""Placement never changes the result: every shape, over budgets, prefetch, accumulation and clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from exact.families import FAMILIES
from exact.reference import Loop, in_memory, offloaded
from exact.shapes import SHAPES, Shape, built

ALL = pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)


def adamw(params: Any) -> outcore.AdamW:
    return outcore.AdamW(params, lr=1e-2, weight_decay=0.1)


CROSSED = [
    (1, None),
    (4, 0.5),
    pytest.param(1, 0.5, marks=pytest.mark.slow),
    pytest.param(4, None, marks=pytest.mark.slow),
]
"""Accumulation and clipping: each with each, of which every run takes all values and `make test-slow` all pairs."""


@ALL
@pytest.mark.parametrize(("accumulate", "clip"), CROSSED)
def test_placement(shape: Shape, accumulate: int, clip: float | None, tmp_path: Path) -> None:
    loop = Loop(accumulate=accumulate, clip=clip)
    expected = in_memory(shape, loop, adamw)
    offloaded(shape, loop, adamw, budget=outcore.Budget(host="1GiB")).assert_equal(expected)
    for host, chunk, prefetch in (("12MiB", "128KiB", clip is None), ("60MiB", "1MiB", clip is not None)):
        offloaded(
            shape,
            loop,
            adamw,
            budget=outcore.Budget(host=host, disk=tmp_path),
            chunk_size=chunk,
            prefetch=prefetch,
        ).assert_equal(expected)


@ALL
@pytest.mark.parametrize("accumulate", [1, 4])
def test_recomputation(shape: Shape, accumulate: int, tmp_path: Path) -> None:
    loop = Loop(accumulate=accumulate)
    offloaded(
        shape,
        loop,
        adamw,
        budget=outcore.Budget(host="12MiB", disk=tmp_path),
        activations=outcore.Activations("recompute"),
        chunk_size="128KiB",
    ).assert_equal(in_memory(shape, loop, adamw))


@pytest.mark.rehearsed
@ALL
def test_fp32(shape: Shape, tmp_path: Path) -> None:
    loop = Loop(precision="fp32", accumulate=2)
    offloaded(
        shape,
        loop,
        adamw,
        budget=outcore.Budget(host="16MiB", disk=tmp_path),
        chunk_size="256KiB",
    ).assert_equal(in_memory(shape, loop, adamw))


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda params: outcore.Adam(params, weight_decay=0.01),
    "SGD": lambda params: outcore.SGD(params, momentum=0.9, nesterov=True),
    "plain SGD": lambda params: outcore.SGD(params),
    "Lion": lambda params: outcore.Lion(params, weight_decay=0.1),
    "Adagrad": lambda params: outcore.Adagrad(params, initial_accumulator_value=0.1),
    "NAdam": lambda params: outcore.Foreign(torch.optim.NAdam, params),
    "RMSprop": lambda params: outcore.Foreign(torch.optim.RMSprop, params, momentum=0.5),
    "AdamW in bf16": lambda params: outcore.AdamW(params, lr=1e-2, moments="bf16"),
    "AdamW in 8 bits": lambda params: outcore.AdamW(params, lr=1e-2, moments="8bit"),
    "Adafactor": lambda params: outcore.Foreign(torch.optim.Adafactor, params),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, precision: str, tmp_path: Path) -> None:
    shape, loop = SHAPES[0], Loop(precision=precision)
    offloaded(
        shape,
        loop,
        OPTIMIZERS[name],
        budget=outcore.Budget(host="12MiB", disk=tmp_path),
        chunk_size="128KiB",
    ).assert_equal(in_memory(shape, loop, OPTIMIZERS[name]))


@pytest.mark.parametrize("shape", SHAPES + FAMILIES, ids=lambda shape: shape.name)
def test_fp32_agrees_with_torch(shape: Shape) -> None:
    """Against torch's own AdamW and clipping: 1e-6 relative, over all weights together.

    Some gradients are zero but for rounding (a key's bias shifts all scores alike); with the usual eps
    Adam would blow that noise up to full steps, which no two implementations share.
    """
    loop = Loop(precision="fp32")
    settings = dict(lr=1e-2, weight_decay=0.1, eps=1e-4)
    ours = offloaded(
        shape, loop, lambda params: outcore.AdamW(params, **settings), budget=outcore.Budget(host="1GiB")
    )
    model = built(shape)
    theirs = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **settings)
    torch.manual_seed(11)
    losses = []
    for step in range(loop.steps):
        theirs.param_groups[0]["lr"] = 1e-2 / (1 + step)
        loss = shape.loss(model(**shape.batch(100 * step)))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        theirs.step()
        theirs.zero_grad()
    assert ours.losses == pytest.approx(losses, rel=1e-6)
    all_theirs = torch.cat([p.detach().reshape(-1) for _, p in model.named_parameters()])
    all_ours = torch.cat([ours.weights[name].reshape(-1) for name, _ in model.named_parameters()])
    assert (all_ours - all_theirs).norm() <= 1e-6 * all_theirs.norm()
