"""A batch in slices against separate micro-batches, where fetching takes longer than computing.

On the emulated accelerator, whose link is throttled so that the two fetches of a unit per pass take ``--ratio`` times
as long as computing it for one slice (forward, recomputation and backward; measured in this run). Both runs have the
same model, rows, recomputation and device budget; the optimizer's own step is not timed. What a block computes is a
small real product and a sleep for each row, once in forward and twice in backward, so that other work on the machine
matters little; ``--real`` computes instead.

With everything overlapped, n micro-batches take 2 n fetches, and a batch in n slices the larger of 2 fetches and n
slices of computing in forward and in backward: with ratio 3, 8 slices take a third of the time. Units that stay on the
device between two uses make the separate micro-batches faster than that; `fetches` says how many there were.

    python benchmarks/slices.py [--slices 8] [--ratio 3] [--blocks 32] [--rounds 5] [--real] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import outcore
from emulated import accelerator
from outcore.offloaded import engine_of


class Sleep(torch.autograd.Function):
    """Takes its time with each row: once in forward, twice in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds * x.shape[0]
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleeping(nn.Module):
    """A small product, and a sleep in place of the computing that would go with its parameters."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Sleep.apply(self.up(x), self.seconds)


class Real(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Run:
    """One offloaded model and its passes over a batch.

    Args:
        parts: backward passes that the batch is divided into.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        x: torch.Tensor,
        parts: int,
        device: int,
        folder: str,
        **activations: int,
    ) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = outcore.SGD(self.model.parameters(), lr=1e-12)
        self.parts = x.chunk(parts)
        outcore.offload(
            self.model,
            self.optimizer,
            device="emu",
            budget=outcore.Budget(device=device, host="4GiB", disk=folder),
            activations=outcore.Activations("recompute", **activations),
        )

    def step(self) -> float:
        start = time.perf_counter()
        for part in self.parts:
            self.model(part).float().square().sum().backward()
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds

    def moved(self, link: str) -> int:
        return outcore.snapshot(self.model).moved[link]


def throttle(gbps: float | None) -> None:
    links = {} if gbps is None else {"h2d_gbps": gbps, "d2h_gbps": gbps}
    accelerator.configure(capacity=8 << 30, checker=False, poison=False, **links)


def measure(options: argparse.Namespace) -> dict[str, float]:
    rows = options.slices * options.rows
    if options.real:
        make = lambda: nn.Sequential(*(Real(options.width) for _ in range(options.blocks)))  # noqa: E731
        shape: tuple[int, ...] = (rows, options.tokens, options.width)
    else:
        seconds = options.milliseconds / 1e3 / options.rows
        make = lambda: nn.Sequential(*(Sleeping(options.width, seconds) for _ in range(options.blocks)))  # noqa: E731
        shape = (rows, options.width)
    throttle(None)
    x = torch.randn(shape, dtype=torch.bfloat16).to("emu")
    with tempfile.TemporaryDirectory() as folder:
        roomy = Run(make, x, 1, 4 << 30, folder, microbatch=options.rows)
        parameters = sum(p.numel() for p in roomy.model.parameters())
        unit = 2 * parameters // options.blocks
        for _ in range(2):
            roomy.step()
        device = engine_of(roomy.model).gauge.largest + options.units * unit
        outcore.release(roomy.model)
        one = Run(make, x[: options.rows], 1, 4 << 30, folder)
        for _ in range(2):
            one.step()
        slice_s = min(one.step() for _ in range(options.rounds))  # other work must not make fetching dearer
        outcore.release(one.model)
    gbps = 2 * 2 * parameters / (options.ratio * slice_s) / 1e9
    times: dict[str, list[float]] = {"slices": [], "micro-batches": []}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "slices": Run(make, x, 1, device, folder, microbatch=options.rows),
            "micro-batches": Run(make, x, options.slices, device, folder),
        }
        for run in runs.values():
            for _ in range(2):
                run.step()
        throttle(gbps)
        before = {name: (run.moved("device in"), run.moved("device out")) for name, run in runs.items()}
        for _ in range(options.rounds):
            for name, run in runs.items():
                times[name].append(run.step())
        moved = {
            f"{what}, {name}": (run.moved(link) - before[name][k]) / options.rounds / (2 * parameters)
            for name, run in runs.items()
            for k, (what, link) in enumerate((("fetches", "device in"), ("gradients down", "device out")))
        }
        for run in runs.values():
            outcore.release(run.model)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "slice_s": slice_s,
        "fetch_s": options.ratio * slice_s / 2,
        "link_gbps": gbps,
        "device_units": device / unit,
        "slices_s": medians["slices"],
        "micro_batches_s": medians["micro-batches"],
        "slices_over_micro_batches": medians["slices"] / medians["micro-batches"],
        "smallest_ratio": min(a / b for a, b in zip(times["slices"], times["micro-batches"], strict=True)),
        "largest_ratio": max(a / b for a, b in zip(times["slices"], times["micro-batches"], strict=True)),
        **moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="of a slice")
    parser.add_argument(
        "--ratio", type=float, default=3.0, help="fetching a unit over computing it for a slice"
    )
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--milliseconds", type=float, default=2.0, help="a block's forward on one slice sleeps"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of a row, with --real")
    parser.add_argument("--units", type=int, default=6, help="room on the device beside activations")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="compute instead of sleeping")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    for name, value in result.items():
        print(f"{name:32} {value:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
