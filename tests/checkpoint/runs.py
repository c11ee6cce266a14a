"""Runs that can be cut in two: train, save, load elsewhere, train on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import outcore
from exact.reference import Result
from exact.shapes import SHAPES, Shape, built

STACK, DROPOUT = SHAPES[0], SHAPES[9]


def adamw(params: Any) -> outcore.Optimizer:
    return outcore.AdamW(params, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Where:
    """A placement."""

    host: str
    disk: bool
    chunk: str

    def settings(self, folder: Any) -> dict[str, Any]:
        budget = outcore.Budget(host=self.host, disk=folder) if self.disk else outcore.Budget(host=self.host)
        return dict(budget=budget, chunk_size=self.chunk)


# In the last two a part of every shape's states is on the disk, in the first none.
MEMORY = Where("1GiB", False, "8MiB")
TIGHT = Where("4MiB", True, "128KiB")
MIDDLE = Where("8MiB", True, "1MiB")


@contextmanager
def offloaded(
    shape: Shape,
    make: Callable[[Any], outcore.Optimizer] = adamw,
    precision: str = "bf16",
    seed: int = 7,
    **settings: Any,
) -> Iterator[tuple[nn.Module, outcore.Optimizer]]:
    """A model with an optimizer, offloaded."""
    model = built(shape, seed)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    settings.setdefault("budget", outcore.Budget(host="1GiB"))
    outcore.offload(model, optimizer, precision=outcore.Precision(precision), **settings)
    try:
        yield model, optimizer
    finally:
        outcore.release(model)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(
    model: nn.Module, optimizer: outcore.Optimizer, shape: Shape, steps: range, result: Result | None = None
) -> Result:
    """The user's loop over some steps; the learning rate follows a scheduler."""
    result = result or Result()
    for step in steps:
        loss = shape.loss(model(**shape.batch(100 * step)))
        optimizer.backward(loss)
        result.losses.append(loss.item())
        result.norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return result


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in outcore.weights(model)}
