"""How much of the transfers hides behind compute, on the emulated accelerator.

The link is throttled so that the transfers of a step take as long as computing it, in two readings:

- *in*: bringing the parameters alone takes as long as the step. Forward is a third of the computing and at least half
  of those bytes, so it waits for the link: nothing gets below 1/2 + 2/3 = 1.17.
- *both*: bringing parameters and taking gradients down, one after the other, takes as long as the step.

Whole steps are timed, the update included. With nothing overlapped the first takes twice as long as either part.

    python benchmarks/overlap.py [--blocks 12] [--width 512] [--tokens 1024] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import outcore
from emulated import accelerator
from outcore.offloaded import engine_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


class Run:
    """One offloaded model and its steps."""

    def __init__(self, options: argparse.Namespace, prefetch: bool, device: str, folder: str) -> None:
        self.model = make(options.blocks, options.width)
        self.optimizer = outcore.SGD(self.model.parameters(), lr=1e-3)
        unit = 8 * options.width * options.width * 2
        outcore.offload(
            self.model,
            self.optimizer,
            device="emu",
            budget=outcore.Budget(device=device, host="4GiB", disk=folder),
            prefetch=prefetch,
            chunk_size=max(unit // 4, 1 << 17),
        )
        self.x = torch.randn(options.tokens, options.width, dtype=torch.bfloat16, device="emu")

    def step(self) -> float:
        start = time.perf_counter()
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def moved(self) -> dict[str, int]:
        return dict(outcore.snapshot(self.model).moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    accelerator.configure(capacity=8 << 30, checker=False, poison=False)
    unit = 8 * options.width * options.width * 2
    with tempfile.TemporaryDirectory() as folder:
        measured = Run(options, False, "4GiB", folder)
        measured.step()
        measured.step()
        device = str(engine_of(measured.model).gauge.largest + 4 * unit + unit // 2)
        outcore.release(measured.model)
    with tempfile.TemporaryDirectory() as folder:
        ahead = Run(options, True, device, folder)
        behind = Run(options, False, device, folder)
        for run in (ahead, behind):
            run.step()
            run.step()
        before = ahead.moved()
        free = statistics.median(ahead.step() for _ in range(options.rounds))
        after = ahead.moved()
        bytes_in = (after["device in"] - before["device in"]) / options.rounds
        bytes_out = (after["device out"] - before["device out"]) / options.rounds
        result = {"compute_s": free}
        accelerator.load()
        for name, nbytes in (("in", bytes_in), ("both", bytes_in + bytes_out)):
            gbps = nbytes / free / 1e9
            accelerator.configure(capacity=8 << 30, checker=False, poison=False, h2d_gbps=gbps, d2h_gbps=gbps)
            times: dict[str, list[float]] = {"ahead": [], "behind": []}
            for run in (ahead, behind):
                run.step()  # the first brings units that came before the link was slow
            for _ in range(options.rounds):
                times["ahead"].append(ahead.step())
                times["behind"].append(behind.step())
            result[f"{name}_link_gbps"] = gbps
            result[f"{name}_step_over_larger"] = statistics.median(times["ahead"]) / free
            result[f"{name}_step_over_larger_without_prefetch"] = statistics.median(times["behind"]) / free
        for run in (ahead, behind):
            outcore.release(run.model)
    for name, value in result.items():
        print(f"{name:36} {value:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
