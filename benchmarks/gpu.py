"""outcore on an accelerator beside FSDP2 with ``CPUOffloadPolicy`` and torch in memory, where that fits.

For each model: seconds per step, tokens per second, exposed transfer, peak device and host memory. Contenders take
turns, each turn in a process of its own; medians are compared. Exposed transfer is what a step takes beyond its update
and beyond "compute": forward and backward of the same model with bf16 weights on the device and no optimizer. ::

    python benchmarks/gpu.py --json gpu.json --report                       # GPT-2 1.3B and a 7B Llama shape
    python benchmarks/gpu.py --models llama-7b --device-budget 24GiB
    python benchmarks/gpu.py --quick                                        # tiny models, a minute or two

Without an accelerator only ``--quick`` runs: outcore on the emulated accelerator of the tests, the others on the CPU.
It then shows that the benchmark works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from outcore.memory.sizes import format_size
from sides.report import machine, raw, spread, table, write_json, write_report
from sides.turns import Place, Score, take_turns

SIZES = {
    "gpt2-1.3b": (8, 1024),
    "llama-7b": (4, 2048),
    "gpt2-tiny": (2, 64),
    "llama-tiny": (2, 64),
}
"""Rows and tokens of a batch."""

CONTENDERS = ("outcore, host", "fsdp2", "torch", "compute")


@dataclass(frozen=True)
class Target:
    """Where contenders compute: the accelerator, or its stand-ins."""

    outcore: str
    others: str

    def of(self, contender: str) -> str:
        return self.outcore if contender.startswith("outcore") or contender == "compute" else self.others


def find_target(quick: bool) -> Target | None:
    """The accelerator, or with ``quick`` the emulated one; ``None`` where there is nothing to measure."""
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        return Target(device.type, device.type)
    return Target("emu", "cpu") if quick else None


def asked(options: argparse.Namespace, target: Target, model: str) -> dict[str, dict[str, Any]]:
    rows, tokens = SIZES[model]
    budget = {"host": options.host_budget}
    if options.device_budget:
        budget["device"] = options.device_budget
    return {
        name: {
            "contender": name,
            "model": model,
            "rows": options.rows or rows,
            "tokens": options.tokens or tokens,
            "device": target.of(name),
            "budget": budget,
            "warm": 2,
            "steps": options.steps,
            "emulator": {},
        }
        for name in CONTENDERS
    }


def exposed(name: str, scores: dict[str, Score], target: Target) -> float | None:
    """Seconds of the median step that are neither update nor compute; ``None`` if that was measured elsewhere."""
    score, compute = scores[name], scores["compute"]
    if not score.turns or not compute.turns or score is compute or target.of(name) != target.outcore:
        return None
    beyond = [s - u for s, u in zip(score.readings("seconds"), score.readings("update"), strict=True)]
    return max(0.0, statistics.median(beyond) - compute.median("seconds"))


def rows_of(scores: dict[str, Score], tokens: int, target: Target) -> Iterator[list[str]]:
    for name, score in scores.items():
        if not score.turns:
            yield [name, f"failed: {score.failure}", *[""] * 5]
            continue
        seconds = score.median("seconds")
        lost = exposed(name, scores, target)
        yield [
            name,
            spread(score.readings("seconds")),
            f"{tokens / seconds:.0f}",
            f"{score.median('update'):.2f}",
            "" if lost is None else f"{lost:.2f} s, {lost / seconds:.0%}",
            format_size(int(score.most("peak_device"))),
            format_size(int(score.most("peak_rss"))),
        ]


HEAD = ["", "seconds per step", "tokens/s", "update, s", "exposed transfer", "peak device", "peak host RSS"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=list(SIZES), default=["gpt2-1.3b", "llama-7b"])
    parser.add_argument("--quick", action="store_true", help="tiny models, one round")
    parser.add_argument("--rows", type=int, help="in a batch")
    parser.add_argument("--tokens", type=int, help="in a row")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--device-budget", help="outcore's; by default what is free")
    parser.add_argument("--host-budget", help="outcore's; by default three quarters of the machine's memory")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a turn may take")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.steps = ["gpt2-tiny", "llama-tiny"], 1, 2
        options.device_budget = options.device_budget or "64MiB"
        options.host_budget = options.host_budget or "256MiB"
    options.host_budget = options.host_budget or str(psutil.virtual_memory().total * 3 // 4)
    return options


def main() -> None:
    options = parse()
    target = find_target(options.quick)
    if target is None:
        sys.exit("there is no accelerator here: --quick runs tiny models on the emulated one")
    about = machine()
    if target.outcore == "emu":
        about["accelerator"] = "emulated; outcore on it, the others on the CPU: no statement about speed"
    about["settings"] = (
        f"bf16 over fp32 masters, AdamW, norm clipped, blocks recomputed; {options.rounds} rounds of {options.steps} "
        f"steps; outcore's budget: device {options.device_budget or 'what is free'}, host {options.host_budget}"
    )
    found: dict[str, Any] = {}
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), options.threads, timeout=options.timeout)
        for model in options.models:
            print(model)
            requests = asked(options, target, model)
            scores = take_turns(requests, place, options.rounds)
            one = requests["compute"]
            parts += [f"## {model}, batch {one['rows']} x {one['tokens']}"]
            parts += [table(HEAD, rows_of(scores, one["rows"] * one["tokens"], target))]
            found[model] = {
                "tokens": one["rows"] * one["tokens"],
                "median_s": {name: s.median("seconds") for name, s in scores.items() if s.turns},
                "exposed_s": {name: exposed(name, scores, target) for name in scores},
                "readings": raw(scores.values()),
            }
    print("", *parts, sep="\n\n")
    if options.json:
        write_json(options.json, {"machine": about, "models": found})
    if options.report:
        shown = " ".join(["python benchmarks/gpu.py", *sys.argv[1:]])
        print(write_report("gpu", "outcore on an accelerator", shown, parts, about))


if __name__ == "__main__":
    main()
