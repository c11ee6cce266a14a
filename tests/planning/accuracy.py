"""One run twice: as a plan foresees it, and as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.memory.budget import Budget
from outcore.memory.sizes import parse_size
from outcore.offloaded import engine_of
from outcore.planning.least import least
from outcore.planning.machine import Machine
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.planner import Planner
from outcore.planning.settings import Settings
from outcore.planning.subject import Subject

STEPS = 4

CPU = Machine("a test", None, 64 << 30, 64 << 30, {"bf16": 1e11}, 1.0, 8e9, 1e10, 0, 0, 2e9, 2e9, 2e10, 1e-5)
"""Any machine will do for bytes."""

EMU = Machine(
    "a test", 8 << 30, 64 << 30, 64 << 30, {"bf16": 1e11}, 1.0, 8e9, 1e10, 0.5e9, 0.5e9, 2e9, 2e9, 2e10, 1e-5
)


@dataclass(frozen=True)
class Case:
    """A model with its settings.

    Attributes:
        make: the model; called under a fixed seed.
        batch: one micro-batch.
        microbatch: rows of a slice of recomputed blocks.
        way: what blocks do with their activations, if it is neither to keep nor to recompute them.
        precision: what the model computes in.
        roomy: everything fits on the host. Otherwise a third of the states do, beside what is needed at least.
        device: the name of the device, if it is not the CPU.
    """

    make: Callable[[], nn.Module]
    batch: Mapping[str, Any]
    recomputes: bool = True
    accumulate: int = 1
    roomy: bool = False
    device: str | None = None
    chunk: str = "256KiB"
    microbatch: int | None = None
    way: Any = None
    precision: Any = "bf16"

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make().train()

    def subject(self, model: nn.Module | None = None) -> Subject:
        model = self.model() if model is None else model
        optimizer, precision = outcore.AdamW(model.parameters()), outcore.Precision(self.precision)
        return Subject(model, optimizer, self.batch, precision=precision, on_host=self.device is None)

    @property
    def settings(self) -> Settings:
        size = next(iter(self.batch.values())).shape[0]
        return Settings(size, self.accumulate, self.activations, parse_size(self.chunk))

    @property
    def activations(self) -> outcore.Activations:
        return outcore.Activations(self.way or ("recompute" if self.recomputes else "keep"), self.microbatch)

    def limits(self, subject: Subject) -> Limits:
        low = self.least(subject)
        if self.roomy:
            return Limits(None if low.device is None else 4 << 30, 4 << 30, 4 << 30)
        device = None if low.device is None else low.device * 5 // 4
        return Limits(device, low.host * 5 // 4 + low.disk // 3, 4 << 30)

    def least(self, subject: Subject) -> Limits:
        units, points = subject.layout(self.settings.chunk_bytes)
        trace = subject.trace(self.settings.micro_batch, self.activations)
        return least(units, points, trace, subject.occupied, self.device is None, self.accumulate).limits


def predict(case: Case, limits: Limits, machine: Machine) -> Outcome:
    """What a plan says of the run."""
    return Planner(case.subject(), machine, limits).simulate(case.settings)


@dataclass(frozen=True)
class Measured:
    """What the run was: as `Outcome`, the moved bytes being those of its last step and the seconds the median of those
    whose order is on record."""

    peak: Mapping[str, int]
    settled: Mapping[str, int]
    moved: Mapping[str, int]
    seconds: float


def measure(
    case: Case,
    limits: Limits,
    folder: Path,
    steps: int = STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Run it."""
    model = case.model()
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(
        model,
        optimizer,
        budget=Budget(device=limits.device, host=limits.host, disk=f"{folder}:{limits.disk}"),
        activations=case.activations,
        precision=outcore.Precision(case.precision),
        device=case.device,
        chunk_size=case.chunk,
    )
    try:
        batch = {name: tensor.to(case.device or "cpu") for name, tensor in case.batch.items()}
        seconds = []
        first: Mapping[str, int] = {}
        for number in range(steps):
            before = outcore.snapshot(model)
            start = clock()
            for _ in range(case.accumulate):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(clock() - start)
            after = outcore.snapshot(model)
            if number == 0:
                first = after.peak
                engine_of(model).ledger.reset_peaks()
        return Measured(
            {tier: max(first[tier], after.peak[tier]) for tier in first},
            after.peak,
            {link: after.moved[link] - before.moved[link] for link in after.moved},
            sorted(seconds[2:])[(len(seconds) - 2) // 2],
        )
    finally:
        outcore.release(model)


def off(predicted: float, found: float) -> float:
    """How far off, as a share of what was found."""
    return 0.0 if predicted == found else (predicted - found) / found if found else float("inf")
