"""What checksums of the disk tier cost of a step that waits for the disk.

    python benchmarks/checksums.py [--width 2048] [--blocks 24] [--host-memory 400MiB] [--steps 9] [--json FILE]

Two runs of the same model on the same disk, one with checksums and one without, take a step each in turns. The share
is of the medians. `waited` says how much of a step the disk was waited for: where that is little, the share says
little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.memory.lane import Lane
from outcore.offloaded import engine_of


class Blocks(nn.Module):
    """Linear layers that compute little for what they hold."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@contextmanager
def checksums(on: bool) -> Iterator[None]:
    """Whether disk tiers that are opened within compute and compare digests."""
    made = Lane.__init__

    def make(self: Lane, *args: Any, **settings: Any) -> None:
        made(self, *args, **settings | {"checksum": on})

    Lane.__init__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lane.__init__ = made  # type: ignore[method-assign]


class Run:
    """A model in training, most of it on disk."""

    def __init__(self, options: argparse.Namespace, folder: str, on: bool) -> None:
        with torch.device("meta"):
            self.model = Blocks(options.width, options.blocks)
        self.optimizer = outcore.AdamW(self.model.parameters(), lr=1e-4)
        budget = outcore.Budget(host=options.host_memory, disk=folder)
        with checksums(on):
            outcore.offload(self.model, self.optimizer, budget=budget)
        self.x = torch.ones(options.batch, options.width)
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.processor: list[float] = []

    def step(self) -> None:
        before, cpu, start = self._waited(), time.process_time(), time.perf_counter()
        self.optimizer.backward(self.model(self.x).float().square().mean())
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        engine_of(self.model).settle()  # or the updates of one run would go on beside the other's step
        engine_of(self.model).pool.quiesce()
        self.seconds.append(time.perf_counter() - start)
        self.processor.append(time.process_time() - cpu)
        self.waited.append(self._waited() - before)

    def _waited(self) -> float:
        return sum(outcore.snapshot(self.model).waited.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--host-memory", default="400MiB")
    parser.add_argument("--steps", type=int, default=9, help="of each run that count; two come before")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = {name: Run(options, folder, name == "with") for name in ("with", "without")}
        for number in range(options.steps + 2):
            for name in list(runs) if number % 2 else reversed(list(runs)):
                runs[name].step()
                print(number, name, f"{runs[name].seconds[-1]:.3f}", file=sys.stderr, flush=True)
        found: dict[str, Any] = {}
        for name, run in runs.items():
            found[name] = {
                "seconds": statistics.median(run.seconds[2:]),
                "waited": statistics.median(run.waited[2:]),
                "processor": statistics.median(run.processor[2:]),
                "moved": outcore.snapshot(run.model).moved,
                "all": run.seconds[2:],
            }
            outcore.release(run.model)
    found["share"] = found["with"]["seconds"] / found["without"]["seconds"] - 1
    text = json.dumps(found, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
