"""One script run twice: on a plain model wholly in memory, and on the same model spread over tiers.

A script is a function of a `Run`: it does what a user's loop would do and logs numbers. `same` demands that
the logs and the final weights agree to the last bit, for a roomy host and for one that holds little more than
a unit, and that afterwards nothing is open or pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from exact.reference import InMemory
from exact.shapes import WIDTH, Stack
from outcore.engine import Engine
from outcore.offloaded import engine_of
from outcore.optim.optimizer import Optimizer
from outcore.optim.scaling import LossScale

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TIGHT = "3MiB"
CHUNK = "128KiB"


def adamw(params: Any) -> outcore.AdamW:
    return outcore.AdamW(params, lr=1e-2, weight_decay=0.1)


def of_trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def floats(seed: int, batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(seed))


def small() -> Stack:
    return Stack(3)


@dataclass
class Run:
    """A model with its optimizer in the middle of a script.

    Attributes:
        engine: what is behind the model; ``None`` in memory.
        log: every number that must not depend on where the states are.
    """

    model: Any
    optimizer: Optimizer
    dtype: torch.dtype
    engine: Engine | None
    log: list[Any] = field(default_factory=list)

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """An input as a plain loop must give it."""
        return x.to(self.dtype) if x.is_floating_point() else x

    def loss(self, seed: int, **sizes: int) -> torch.Tensor:
        loss = self.model(self.cast(floats(seed, **sizes))).float().square().mean()
        self.log.append(loss.item())
        return loss

    def backward(self, seed: int, **sizes: int) -> None:
        self.optimizer.backward(self.loss(seed, **sizes))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *seeds: int, **sizes: int) -> None:
        """Whole steps, one for each seed."""
        for seed in seeds:
            self.backward(seed, **sizes)
            self.log.append(self.optimizer.clip_grad_norm_(1.0).item())
            self.step()


Script = Callable[[Run], None]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def in_memory(
    script: Script, build: Callable[[], nn.Module], make: Callable[[Any], Optimizer], precision: str
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The script on a plain model, its gradients kept by the rule of `outcore.optim.gradients`."""
    model = seeded(build)
    dtype = DTYPES[precision]
    optimizer = make(model)
    masters = {p: p.detach().clone() for p in model.parameters()}
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    sums: dict[nn.Parameter, torch.Tensor] = {}

    def accumulated(p: Any) -> None:
        sums[p] = p.grad if p not in sums else sums[p].float() + p.grad.float()
        p.grad = None

    for p in of_trained(model):
        p.register_post_accumulate_grad_hook(accumulated)
    backend = InMemory(optimizer, masters, sums)
    optimizer._local = backend
    optimizer.loss_scale = LossScale() if precision == "fp16" else None
    run = Run(model, optimizer, dtype, None)
    torch.manual_seed(11)
    script(run)
    return run.log, {name: backend.weight(p).clone() for name, p in model.named_parameters()}


def assert_idle(engine: Engine) -> None:
    """Nothing is open, and nothing is pinned, between two steps."""
    engine.settle()
    assert [unit.name for unit in engine.units if unit.opened] == []
    assert engine.backward.calls == []
    for unit in engine.units:
        assert all(chunk.pins == 0 for store in unit.stores for chunk in store.chunks())


@contextmanager
def spread(
    build: Callable[[], nn.Module] = small,
    make: Callable[[Any], Optimizer] = lambda model: adamw(of_trained(model)),
    precision: str = "bf16",
    **settings: Any,
) -> Iterator[Run]:
    """An offloaded model, released at the end."""
    model = seeded(build)
    optimizer = make(model)
    settings.setdefault("chunk_size", CHUNK)
    outcore.offload(model, optimizer, precision=outcore.Precision(precision), **settings)
    try:
        yield Run(model, optimizer, DTYPES[precision], engine_of(model))
    finally:
        outcore.release(model)


def same(
    script: Script,
    disk: Path,
    build: Callable[[], nn.Module] = small,
    make: Callable[[Any], Optimizer] = lambda model: adamw(of_trained(model)),
    precision: str = "bf16",
    tight: str = TIGHT,
    **settings: Any,
) -> None:
    """Run the script in memory, roomy and tight: all alike, and nothing left open."""
    log, weights = in_memory(script, build, make, precision)
    for host in ("256MiB", tight):
        budget = outcore.Budget(host=host, disk=disk)
        with spread(build, make, precision, budget=budget, **settings) as run:
            torch.manual_seed(11)
            script(run)
            assert run.log == log, host
            assert run.engine is not None
            assert_idle(run.engine)
            for name, value in outcore.weights(run.model):
                assert torch.equal(value, weights[name]), (host, name)
            held = outcore.snapshot(run.model)
            assert held.peak["host"] <= held.budget["host"]


__all__ = [
    "WIDTH",
    "Run",
    "adamw",
    "assert_idle",
    "floats",
    "in_memory",
    "of_trained",
    "same",
    "small",
    "spread",
]
