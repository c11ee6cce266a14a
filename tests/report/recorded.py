"""Runs, records and log directories to draw reports of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.report.chrome import to_trace
from outcore.report.timeline import Level, Record, Span


class Net(nn.Module):
    """Blocks between two more units, some 350,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5))
        self.last = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


UNITS = {"first", "last", *(f"blocks.{k}" for k in range(5))}


def offloaded(disk: Path, host: str = "4MiB", **settings: Any) -> tuple[nn.Module, outcore.Optimizer]:
    """A model under a host budget that leaves no room for all of it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3)
    budget = outcore.Budget(host=host, disk=disk, device=settings.pop("device_memory", None))
    outcore.offload(model, optimizer, budget=budget, chunk_size="128KiB", **settings)
    return model, optimizer


def step(model: nn.Module, optimizer: outcore.Optimizer, seed: int = 0) -> float:
    """One step of training; its loss."""
    generator = torch.Generator().manual_seed(seed)
    loss = model(torch.randn(16, 64, generator=generator)).float().square().mean()
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# -- made up ------------------------------------------------------------------------------------------

MIB = 1 << 20


def record(number: int = 2, start: float = 10.0, name: str = "blocks.0") -> Record:
    """A step of one second on a device, with a disk that reads twice at once."""
    spans = (
        Span("forward", name, start + 0.1, start + 0.3),
        Span("backward", name, start + 0.3, start + 0.6),
        Span("waiting", "disk read", start + 0.0, start + 0.1),
        Span("device waiting", "device in", start + 0.3, start + 0.32),
        Span("disk read", f"{name} parameters 1/2", start + 0.0, start + 0.1, 50 * MIB),
        Span("disk read", f"{name} parameters 2/2", start + 0.05, start + 0.2, 50 * MIB),
        Span("device in", f"{name} parameters 1/2", start + 0.1, start + 0.15, 50 * MIB),
        Span("update", f"{name} parameters 1/2", start + 0.7, start + 0.9),
        Span("disk write", f"{name} optimizer states 1/2", start + 0.9, start + 1.2, 80 * MIB),
    )
    levels = (
        Level(start, "host", "parameters", 10 * MIB),
        Level(start, "host", "optimizer states", 20 * MIB),
        Level(start, "device", "parameters", 5 * MIB),
        Level(start + 0.2, "host", "parameters", 60 * MIB),
        Level(start + 0.5, "host", "gradients", 30 * MIB),
        Level(start + 0.8, "host", "gradients", 0),
    )
    budget = {"host": 128 * MIB, "device": 8 * MIB}
    return Record(number, start, start + 1.0, tuple(sorted(spans, key=lambda s: s.start)), levels, budget)


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A line of ``metrics.jsonl``."""
    return {
        "step": step,
        "loss": 8.0 - 0.1 * step,
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens": 1024,
        "seconds": 1.0 if step > 1 else 3.0,
        "tokens_per_second": 1024.0,
        "skipped": 0,
        "held": {"device": 5 * MIB, "host": 90 * MIB, "disk": 300 * MIB},
        "peak": {"device": 6 * MIB, "host": 120 * MIB, "disk": 310 * MIB},
        "budget": {"device": 8 * MIB, "host": 128 * MIB, "disk": 1024 * MIB},
        "moved": {"disk read": 100 * MIB, "disk write": 80 * MIB, "device in": 50 * MIB, "device out": 0},
        "waited": {"disk read": 0.1, "disk write": 0.0, "device in": 0.05, "device out": 0.0},
        "compute": 0.65 if step > 1 else 2.65,
        "update": 0.2,
    } | changes


def log(folder: Path, steps: int = 8, name: str = "blocks.0") -> Path:
    """A whole log directory."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row(k)) for k in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    records = [record(2, 10.0, name), record(3, 11.1, name), record(steps, 20.0, name)]
    (folder / "trace.json").write_text(json.dumps(to_trace(records)))
    run = {"outcore": "0.1.0", "started": "2026-01-02T03:04:05+00:00", "plan": {"model": f"{name}, a model"}}
    (folder / "run.json").write_text(json.dumps(run))
    plan = {
        "peak_bytes": {"host": 110 * MIB, "device": 6 * MIB},
        "step": {"seconds": 0.9, "bottleneck": "the disk"},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder
