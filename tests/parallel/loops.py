"""What ranks do in these tests: ordinary loops on toy models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import outcore
from exact.shapes import Stack
from outcore.model import ranked_sites
from outcore.parallel.exchange import SharedExchange, WireExchange
from outcore.parallel.node import can_share
from outcore.parallel.ranks import World
from parallel.together import Place

ROWS = 12
"""Rows of the whole batch, over all ranks."""


def stack() -> nn.Module:
    torch.manual_seed(7)
    return Stack(3)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, 12, 32, generator=torch.Generator().manual_seed(seed))


def rows_of(x: torch.Tensor, place: Place) -> torch.Tensor:
    """This rank's share of a batch."""
    return x.chunk(place.ranks)[place.rank]


@contextmanager
def apart(on: bool = True) -> Iterator[None]:
    """Ranks share no memory, as on different machines."""

    def cannot(world: World, willing: bool) -> bool:
        return can_share(world, False)

    with mock.patch.object(ranked_sites, "can_share", cannot if on else can_share):
        yield


@dataclass(frozen=True)
class Way:
    """How to train."""

    sharding: str = "parameters"
    accumulate: int = 1
    clip: float | None = 0.5
    precision: str = "fp32"
    host: str = "64MiB"
    disk: bool = False
    steps: int = 3
    activations: str = "keep"
    sums: str = "backward"


def offloaded(model: nn.Module, way: Way, place: Place, **settings: Any) -> Any:
    optimizer = outcore.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.1)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(host=way.host, disk=place.disk if way.disk else None),
        precision=outcore.Precision(way.precision),  # type: ignore[arg-type]
        activations=outcore.Activations(way.activations),  # type: ignore[arg-type]
        chunk_size="128KiB",
        device="cpu",
        sharding=_sharding(way) if place.ranks > 1 else None,
        **settings,
    )
    return optimizer


def _sharding(way: Way) -> outcore.Sharding:
    return outcore.Sharding(way.sharding, timeout=20, sums=way.sums)  # type: ignore[arg-type]


def train(model: Any, optimizer: Any, way: Way, place: Place, first: int = 0) -> dict[str, Any]:
    """Losses, norms and weights."""
    losses, norms = [], []
    for step in range(first, first + way.steps):
        for micro in range(way.accumulate):
            x = rows_of(inputs(100 * step + micro), place)
            loss = model(x).float().square().mean() / way.accumulate
            optimizer.backward(loss)
            losses.append(loss.item())
        if way.clip is not None:
            norms.append(optimizer.clip_grad_norm_(way.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in outcore.weights(model)}
    return {"losses": losses, "norms": norms, "weights": weights}


@contextmanager
def pieces_of(nbytes: int | None) -> Iterator[None]:
    """What ranks have for each other goes in pieces of so many bytes."""
    if nbytes is None:
        yield
        return
    wire, shared = (mock.patch.object(kind, "LARGEST", nbytes) for kind in (WireExchange, SharedExchange))
    with wire, shared:
        yield


def several(place: Place) -> list[dict[str, Any]]:
    """Train in one way after the other."""
    found = []
    for way in place.settings["ways"]:
        model = place.settings.get("build", stack)()
        with apart(place.settings.get("apart", False)), pieces_of(place.settings.get("piece")):
            optimizer = offloaded(model, way, place)
        found.append(train(model, optimizer, way, place))
        found[-1]["snapshot"] = outcore.snapshot(model)
        outcore.release(model)
    return found
