"""What checksums of the disk tier cost of a step that waits for the disk.

    python benchmarks/checksums.py [--host-memory 400MiB] [--rounds 9] [--steps 4] [--bandwidth 2GB] [--json FILE]

Two runs of the same model on the same disk, one with checksums and one without, take a few steps each in turns, one
step after the other as in training; what is still under way at the end of a turn counts. The share is of the medians.
`waited` says how much of a step the disk was waited for: where that is little, the share says little.

A digest is computed at the speed of memory, so what it costs depends on how much faster that is than the disk.
``--bandwidth`` holds the disk to so many bytes per second, reads and writes together, as a slower one would be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.memory.blockfile import BlockFile
from outcore.memory.lane import Lane
from outcore.memory.sizes import format_size, parse_size
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


class Paced:
    """A file that moves no more than ``bandwidth`` bytes per second, reads and writes together."""

    def __init__(self, file: BlockFile, bandwidth: float) -> None:
        self._file, self._bandwidth = file, bandwidth
        self._lock, self._free = threading.Lock(), 0.0

    def pread(self, view: memoryview, offset: int) -> int:
        return self._in_turn(self._file.pread, view, offset)

    def pwrite(self, view: memoryview, offset: int) -> int:
        return self._in_turn(self._file.pwrite, view, offset)

    def _in_turn(self, move: Callable[[memoryview, int], int], view: memoryview, offset: int) -> int:
        with self._lock:
            self._free = over = max(self._free, time.perf_counter()) + len(view) / self._bandwidth
        moved = move(view, offset)
        time.sleep(max(0.0, over - time.perf_counter()))
        return moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def lanes(checksum: bool, bandwidth: float | None) -> Iterator[None]:
    """Whether disk tiers that are opened within compute and compare digests, and how fast their disks are."""
    made = Lane.__init__

    def make(self: Lane, file: BlockFile, *args: Any, **settings: Any) -> None:
        paced = file if bandwidth is None else Paced(file, bandwidth)
        made(self, paced, *args, **settings | {"checksum": checksum})

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
        with lanes(on, options.bandwidth):
            outcore.offload(self.model, self.optimizer, budget=budget)
        self.x = torch.ones(options.batch, options.width)
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.processor: list[float] = []

    def turn(self, steps: int) -> None:
        """Train on; the update of the last step, and what it writes, ends within the turn."""
        before, cpu, start = self._waited(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.optimizer.backward(self.model(self.x).float().square().mean())
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        engine_of(self.model).settle()
        engine_of(self.model).pool.quiesce()
        self.seconds.append((time.perf_counter() - start) / steps)
        self.processor.append((time.process_time() - cpu) / steps)
        self.waited.append((self._waited() - before) / steps)

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
    parser.add_argument("--rounds", type=int, default=9, help="that count; one comes before")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument(
        "--bandwidth", type=parse_size, default=None, help="bytes per second; default: the disk's own"
    )
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = {name: Run(options, folder, name == "with") for name in ("with", "without")}
        for number in range(options.rounds + 1):
            for name in list(runs) if number % 2 else reversed(list(runs)):
                runs[name].turn(options.steps)
                print(number, name, f"{runs[name].seconds[-1]:.3f}", file=sys.stderr, flush=True)
        found: dict[str, Any] = {}
        steps = (options.rounds + 1) * options.steps
        for name, run in runs.items():
            found[name] = {
                "seconds": statistics.median(run.seconds[1:]),
                "waited": statistics.median(run.waited[1:]),
                "processor": statistics.median(run.processor[1:]),
                "moved": {link: moved // steps for link, moved in outcore.snapshot(run.model).moved.items()},
                "all": run.seconds[1:],
            }
            outcore.release(run.model)
    found["share"] = found["with"]["seconds"] / found["without"]["seconds"] - 1
    for name in ("with", "without"):
        each = found[name]
        print(
            f"{name:8} {each['seconds']:.3f} s a step ({min(each['all']):.3f} to {max(each['all']):.3f}), "
            f"{each['waited']:.3f} of them waiting for the disk, {each['processor']:.3f} processor s, "
            f"{format_size(sum(each['moved'].values()))} moved"
        )
    print(f"checksums: {found['share']:+.1%} of a step")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
