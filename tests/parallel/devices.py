"""What ranks do in the tests of accelerators: the loops of `parallel.loops` on the emulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import outcore
from emulated import accelerator
from parallel.loops import Way, stack, train
from parallel.together import Place


@dataclass(frozen=True)
class Lift:
    """A way to train, and the device of each rank.

    Attributes:
        kinds: where each rank computes; the first one again where there are more ranks.
        memory: the budget of the emulated accelerator.
    """

    way: Way = field(default_factory=Way)
    kinds: tuple[str, ...] = (accelerator.NAME,)
    memory: str = "8MiB"

    def kind(self, place: Place) -> str:
        return self.kinds[place.rank % len(self.kinds)]


@contextmanager
def computing_on(kind: str, **settings: Any) -> Iterator[None]:
    """The emulated accelerator is there, if it is asked for; races in it are raised at the end."""
    if kind == "cpu":
        yield
        return
    accelerator.configure(**settings)
    try:
        yield
        torch.accelerator.synchronize()
        accelerator.check()
        assert accelerator.races() == []
    finally:
        accelerator.reset()


def lifted(model: nn.Module, lift: Lift, place: Place, **settings: Any) -> Any:
    way, kind = lift.way, lift.kind(place)
    optimizer = outcore.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.1)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(
            device=None if kind == "cpu" else lift.memory,
            host=way.host,
            disk=place.disk if way.disk else None,
        ),
        precision=outcore.Precision(way.precision),  # type: ignore[arg-type]
        activations=outcore.Activations(way.activations),  # type: ignore[arg-type]
        chunk_size="128KiB",
        device=kind,
        sharding=outcore.Sharding(way.sharding, timeout=20) if place.ranks > 1 else None,  # type: ignore[arg-type]
        **settings,
    )
    return optimizer


def trained(place: Place) -> list[dict[str, Any]]:
    """Train in one way after the other; what the emulated accelerator itself counted is added."""
    found = []
    for lift in place.settings["lifts"]:
        kind = lift.kind(place)
        with computing_on(kind, **place.settings.get("emulator", {})):
            model = place.settings.get("build", stack)()
            optimizer = lifted(model, lift, place)
            result = train(model, optimizer, lift.way, place)
            result["snapshot"] = outcore.snapshot(model)
            result["counted"] = 0 if kind == "cpu" else torch.accelerator.max_memory_allocated()
            outcore.release(model)
            del model, optimizer
        found.append(result)
    return found
