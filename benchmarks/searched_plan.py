"""Is the searched plan the fastest? Each single way with fixed settings and the plan, run in turns on this machine.

Budgets hold a third of the states of a GPT-2 of 28M parameters, the rest is on disk. Of each way the median step of
several rounds is compared: the machine changes from minute to minute, and all ways see each of these minutes.

    python benchmarks/searched_plan.py --folder DIR [--rounds 3] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import outcore
from outcore.errors import BudgetError
from outcore.planning.measure import measure as profile
from outcore.planning.planner import Planner
from outcore.planning.settings import Settings
from outcore.planning.this import Here
from plan_accuracy import Timed, gpt2, ids
from planning.accuracy import Case, measure

SEQUENCES = 8


def case(settings: Settings) -> Case:
    """A run with these settings."""
    return Case(
        lambda: gpt2(8, 512, 4096),
        ids(settings.micro_batch, 256, 4096),
        settings.activations.blocks == "recompute",
        settings.accumulate,
        chunk=str(settings.chunk_bytes),
        microbatch=settings.activations.microbatch,
    )


def ways() -> dict[str, Settings]:
    """Each way by itself."""
    found = {}
    for micro in (8, 2):
        for blocks in ("keep", "recompute"):
            settings = Settings(micro, SEQUENCES // micro, outcore.Activations(blocks), 1 << 20)  # type: ignore[arg-type]
            found[str(settings)] = settings
    sliced = Settings(SEQUENCES, 1, outcore.Activations("recompute", 2), 1 << 20)
    return {**found, str(sliced): sliced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rounds of five steps: under eight minutes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    every = ways()
    thrifty = case(Settings(2, SEQUENCES // 2, outcore.Activations("recompute"), 1 << 20))
    limits = thrifty.limits(thrifty.subject())
    rounds, steps = (2, 5) if options.quick else (options.rounds, 6)
    machine = Timed(**vars(Here.of(profile(torch.device("cpu"), options.folder))))
    subject = case(Settings(SEQUENCES, 1, outcore.Activations(), 1 << 20)).subject()
    planner = Planner(subject, machine, limits)
    best = planner.best(SEQUENCES, 1, None, None, 1 << 20, None, 1)
    chosen = Settings(best.micro_batch, best.accumulate, best.activations, best.chunk_bytes)
    every["searched"] = chosen  # also where it is one of the others: then their distance is that of chance
    planned = {name: outcome.seconds for name, s in every.items() if (outcome := planner.fits(s)) is not None}
    found: dict[str, list[float]] = {name: [] for name in planned}
    for _ in range(rounds):
        for name in found:
            try:
                with tempfile.TemporaryDirectory(dir=options.folder) as inside:
                    found[name].append(measure(case(every[name]), limits, Path(inside), steps).seconds)
            except BudgetError as error:
                print(f"{name}: {error}", flush=True)
    rows: list[dict[str, Any]] = []
    for name, seconds in found.items():
        if seconds:
            rows.append({"way": name, "planned": planned[name], "measured": statistics.median(seconds)})
            print(
                f"{name:56} planned {planned[name]:.3f} s, measured {rows[-1]['measured']:.3f} s", flush=True
            )
    own = next(row for row in rows if row["way"] == "searched")
    other = min((row for row in rows if row["way"] != "searched"), key=lambda row: row["measured"])
    print(
        f"\nsearched: {chosen}, chunks of {chosen.chunk_bytes >> 20} MiB, of {planner.tried} that were simulated; "
        f"{own['measured'] / other['measured']:.3f} of the fastest other, {other['way']}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
