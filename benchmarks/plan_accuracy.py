"""How far a plan is from the run: peaks of each tier and bytes moved, and the time of a step.

Memory: GPT-2, Llama, T5 and Mixtral at toy size and GPT-2 124M, kept and recomputed, 1 and 4 micro-batches, tight and
roomy, on the CPU and, if asked for, on the emulated device. Time: ten settings of a model large enough to be timed,
in rounds in which this machine is profiled and each setting is planned and run, in a process of its own; a round takes
four to six minutes.

    python benchmarks/plan_accuracy.py --folder DIR [--device emu] [--large] [--json FILE]
    python benchmarks/plan_accuracy.py --folder DIR [--device emu] --time [--rounds N] [--cpu] [--only WORD] [--link G]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import outcore
from exact.families import FAMILIES
from outcore.errors import BudgetError
from outcore.planning.machine import Machine
from outcore.planning.measure import measure as profile
from outcore.planning.outcome import Outcome
from outcore.planning.replay import Clock
from outcore.planning.this import Here
from outcore.planning.timebook import Timebook
from outcore.planning.timing import Replays, Timing
from planning.accuracy import Case, measure, off, predict

SHAPES = {shape.name: shape for shape in FAMILIES}
LINK = 1e9
"""Bytes per second of the emulated device's links."""

SLOW = 5e7
"""The same where times are measured: steps of so few tokens are then bound by the links."""

STEPS = 6
"""Steps of a run that is timed: the order of uses is on record from the third on."""


def ids(batch: int, length: int, words: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, words, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def gpt2(layers: int, width: int, words: int = 50257) -> Any:
    config = hf.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=width // 64,
        vocab_size=words,
        use_cache=False,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config)


def memory_cases(device: str | None, large: bool) -> dict[str, Case]:
    cases = {}
    names = ("gpt2", "llama", "t5", "mixtral")
    for name, recomputes, accumulate, roomy in itertools.product(names, (False, True), (1, 4), (False, True)):
        shape = SHAPES[name]
        label = (
            f"{name} {'recompute' if recomputes else 'keep'} x{accumulate} {'roomy' if roomy else 'tight'}"
        )
        cases[label] = Case(shape.build, shape.batch(0), recomputes, accumulate, roomy, device)
    if large:
        for recomputes, accumulate in itertools.product((False, True), (1, 4)):
            label = f"gpt2-124m {'recompute' if recomputes else 'keep'} x{accumulate} tight"
            batch = ids(2, 256, 50257)
            cases[label] = Case(
                lambda: gpt2(12, 768), batch, recomputes, accumulate, False, device, chunk="8MiB"
            )
    return cases


def time_cases(device: str | None) -> dict[str, Case]:
    """Settings whose times differ: all on the host, bound by the disk, recomputed, accumulated, wide and narrow.

    The emulated device is to be bound by its links, and what it computes two threads of this processor compute, which
    everything else needs too: so it gets a quarter of the tokens. It computes in fp32: where the processor has no
    instructions for bf16, it multiplies that in plain loops.
    """
    rows = 4 if device is None else 1
    small, large = ids(rows, 256, 4096), ids(2 * rows, 256, 4096)

    def model() -> Any:
        return gpt2(8, 512, 4096)

    kinds: dict[str, tuple[Any, bool, int, bool]] = {
        "host, keep": (small, False, 1, True),
        "host, recompute": (small, True, 1, True),
        "host, recompute x4": (small, True, 4, True),
        "host, keep, twice the batch": (large, False, 1, True),
        "disk, keep": (small, False, 1, False),
        "disk, recompute": (small, True, 1, False),
        "disk, recompute x2": (small, True, 2, False),
        "disk, recompute x4": (small, True, 4, False),
        "disk, twice the batch": (large, True, 1, False),
        "disk, few tokens": (ids(1, 64, 4096), True, 1, False),
    }
    precision = "bf16" if device is None else "fp32"
    return {
        label: Case(model, batch, recomputes, accumulate, roomy, device, "1MiB", precision=precision)
        for label, (batch, recomputes, accumulate, roomy) in kinds.items()
    }


def compare(case: Case, machine: Machine, folder: Path) -> dict[str, Any]:
    limits = case.limits(case.subject())
    planned = predict(case, limits, machine)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        found = measure(case, limits, Path(inside))
    return {
        "peak": {
            t: (planned.peak[t], found.peak[t], off(planned.peak[t], found.peak[t])) for t in planned.peak
        },
        "settled": {
            t: (planned.settled[t], found.settled[t], off(planned.settled[t], found.settled[t]))
            for t in planned.settled
        },
        "moved": {link: (nbytes, found.moved[link]) for link, nbytes in planned.moved.items()},
        "seconds": (planned.seconds, found.seconds, off(planned.seconds, found.seconds)),
    }


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(k) for k in range(len(values))]


def correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of values that are all different."""
    count = len(first)
    apart = sum((a - b) ** 2 for a, b in zip(ranks(first), ranks(second), strict=True))
    if count < 2:
        return math.nan
    return 1 - 6 * apart / (count * (count**2 - 1))


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(options.device or "cpu")
    machine = Here.of(profile(device, options.folder), device)
    rows: list[dict[str, Any]] = []
    for label, case in memory_cases(options.device, options.large).items():
        try:
            row = compare(case, machine, options.folder)
        except BudgetError as error:
            print(f"{label:32} refused: {error}", flush=True)
            rows.append({"case": label, "refused": str(error)})
            continue
        rows.append({"case": label, **row})
        said = "  ".join(f"{tier} {100 * share:+.1f} %" for tier, (_, _, share) in row["peak"].items())
        print(f"{label:32} {said}", flush=True)
    shares = [abs(s) for r in rows if "peak" in r for t, (_, _, s) in r["peak"].items() if t != "disk"]
    disks = [abs(r["peak"]["disk"][2]) for r in rows if "disk" in r.get("peak", {})]
    within = sum(share <= 0.05 for share in shares)
    print(
        f"\nhost and device: {within} of {len(shares)} peaks within 5 %, the furthest {100 * max(shares):.1f} %"
    )
    print(
        f"disk: {sum(s <= 0.05 for s in disks)} of {len(disks)} within 5 %, the furthest {100 * max(disks):.1f} %"
    )
    return rows


@dataclass(frozen=True)
class Timed(Here):
    """This machine; what it computes is run again for each of these."""

    clock: Clock = time.perf_counter

    def timing(self) -> Timing:
        return Replays(self, Timebook(), self.clock, self.at)


def turn(options: argparse.Namespace, label: str, profiled: Here) -> tuple[Outcome, float]:
    """The plan of one setting, and seconds of its step."""
    prepare(options)
    clock = time.process_time if options.cpu else time.perf_counter
    case = time_cases(options.device)[label]
    limits = case.limits(case.subject())
    planned = predict(case, limits, Timed(**vars(profiled), clock=clock))
    with tempfile.TemporaryDirectory(dir=options.folder) as inside:
        return planned, measure(case, limits, Path(inside), STEPS, clock).seconds


def times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs and plans in turns: on a shared machine speeds change by the minute, and medians of both are compared.

    Each setting is planned and run in a process of its own: what a run before left of the C library's heap would be
    there for the next one's results, and for those of its plan even more.
    """
    device = torch.device(options.device or "cpu")
    cases = [label for label in time_cases(options.device) if options.only in label]
    found: dict[str, list[float]] = {label: [] for label in cases}
    planned: dict[str, list[Outcome]] = {label: [] for label in cases}
    for _ in range(options.rounds):
        profiled = Here.of(profile(device, options.folder), device)
        print(
            f"profile: disk {profiled.disk_read / 1e9:.2f} GB/s read, {profiled.disk_write / 1e9:.2f} written, "
            f"{1e3 * profiled.turn:.2f} ms each transfer, {1e3 * profiled.use:.2f} each use; "
            f"a transfer "
            f"costs computing {1e3 * profiled.io_turn:.2f} ms and a second for {profiled.io_rate / 1e9:.2f} GB; the "
            f"disk keeps {profiled.slowed:.2f} of its speed; computing and an update {profiled.both:.2f}",
            flush=True,
        )
        for label in cases:
            with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as alone:
                plan, seconds = alone.submit(turn, options, label, profiled).result()
            planned[label].append(plan)
            found[label].append(seconds)
            print(f"  {label}: {planned[label][-1].seconds:.3f}, {found[label][-1]:.3f}", flush=True)
    rows: list[dict[str, Any]] = []
    for label in cases:
        outcomes = planned[label]
        guesses = [o.compute + o.update if options.cpu else o.seconds for o in outcomes]
        guess, measured = statistics.median(guesses), statistics.median(found[label])
        share = off(guess, measured)
        rows.append(
            {"case": label, "seconds": (guess, measured, share), "plans": guesses, "rounds": found[label]}
        )
        middle = min(outcomes, key=lambda o: abs(o.seconds - guess))
        print(
            f"{label:32} planned {guess:.3f} s (computing {middle.compute:.3f}, update {middle.update:.3f}, "
            f"{', '.join(f'{link} {busy:.3f}' for link, busy in middle.busy.items() if busy)}), "
            f"measured {measured:.3f} s, {100 * share:+.0f} %",
            flush=True,
        )
    planned_times = [row["seconds"][0] for row in rows]
    measured_times = [row["seconds"][1] for row in rows]
    within = sum(abs(row["seconds"][2]) <= 0.15 for row in rows)
    print(
        f"\n{within} of {len(rows)} within 15 %; rank correlation {correlation(planned_times, measured_times):.2f}"
    )
    return rows


def prepare(options: argparse.Namespace) -> None:
    """What a process needs before it plans or runs."""
    hf.logging.set_verbosity_error()
    outcore.widen_matmuls()
    if options.cpu:
        torch.set_num_threads(1)
    if options.device == "emu":
        from emulated import accelerator

        accelerator.load()
        link = options.link or (SLOW if options.time else LINK) / 1e9
        accelerator.configure(h2d_gbps=link, d2h_gbps=link, checker=False, poison=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["emu"])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="of --time: one thread, and seconds of CPU time, which others on this machine hardly change; what disks "
        "and threads wait for is then left out on both sides, but not what the disk's threads do",
    )
    parser.add_argument("--only", default="", help="of --time: settings whose name has this in it")
    parser.add_argument(
        "--link",
        type=float,
        help="GB/s of the emulated device's links: the less, the more a step is bound by them",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of --time: profiles, and runs of each setting")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options)
    rows = (times if options.time else memory)(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
