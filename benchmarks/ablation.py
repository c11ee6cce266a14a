"""Each idea off, one at a time: what a step, or a token, then costs in time, processor time, bytes moved and memory.

Settings take turns, each in a process of its own. An idea is turned off by putting its predecessor in its place
(``sides/without.py``), so that the library has no switches for it. Times on a machine with other work say little; bytes
do. ::

    python benchmarks/ablation.py --directory /nvme --quick --json ablation.json
    python benchmarks/ablation.py --directory /nvme --model gpt2 --rounds 3 --report
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from sides.generation import forget_pages, write_weights
from sides.report import machine, peak, raw, spread, table, write_json, write_report
from sides.turns import Place, Score, take_turns
from sides.without import WITHOUT, WITHOUT_GENERATING

MB = 1e6


def training(options: argparse.Namespace) -> dict[str, Score]:
    """A run on the disk with all ideas, and without each."""
    common = {
        "contender": "outcore, disk",
        "model": options.model,
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 3,
        "steps": options.steps,
        "budget": {"host": options.host_budget},
    }
    asked: dict[str, dict[str, Any]] = {"all": common}
    asked |= {f"without {name}": {**common, "without": name} for name in WITHOUT}
    asked |= {name: {**common, "contender": f"outcore, {name}"} for name in ("slices", "micro-batches")}
    return take_turns(asked, Place(options.directory, options.threads), options.rounds)


def generating(options: argparse.Namespace) -> dict[str, Score]:
    """Tokens from weights on disk."""
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        write_weights(options.generation_model, Path(folder))
        common = {
            "contender": "outcore",
            "model": options.generation_model,
            "weights": folder,
            "rows": 1,
            "tokens": 32,
            "new_tokens": options.new_tokens,
            "device": "cpu",
            "budget": {"host": options.generation_host},
        }
        asked: dict[str, dict[str, Any]] = {"all": common}
        asked |= {f"without {name}": {**common, "without": name} for name in WITHOUT_GENERATING}
        at = Place(options.directory, options.threads)
        return take_turns(asked, at, options.rounds, lambda: forget_pages(Path(folder)))


def rows_of(scores: dict[str, Score], base: str) -> list[list[str]]:
    rows = []
    for name, score in scores.items():
        if not score.turns:
            rows.append([name, f"failed: {score.failure}", "", "", "", ""])
            continue
        moved = score.turns[0]["moved"]
        ratio = score.median("seconds") / scores[base].median("seconds") if scores[base].turns else 0.0
        disk = f"{moved['disk read'] / MB:,.0f} / {moved['disk write'] / MB:,.0f}"
        processor = f"{score.median('processor'):.2f}" if "processor" in score.turns[0] else ""
        rows.append([name, spread(score.readings("seconds")), f"{ratio:.2f}", processor, disk, peak(score)])
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--quick", action="store_true", help="a small model, one round: within eight minutes")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--host-budget", default="768MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--generation-model", default="gpt2-large")
    parser.add_argument("--generation-host", default="640MiB")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.model, options.host_budget, options.rows, options.tokens = "gpt2-7m", "96MiB", 2, 64
        options.rounds, options.steps, options.new_tokens = 1, 2, 6
        options.generation_model, options.generation_host = "gpt2-34m", "40MiB"
    return options


def main() -> None:
    options = parse()
    about = machine()
    trained, generated = training(options), generating(options)
    head = ["", "seconds", "of all", "processor s", "disk read / written, MB", "peak RSS"]
    meaning = [[f"without {name}", what] for name, (what, _) in (WITHOUT | WITHOUT_GENERATING).items()]
    meaning += [["slices", "the batch in slices of one row"], ["micro-batches", "each row by itself, summed"]]
    parts = [
        f"A step of {options.model}, batch {options.rows} x {options.tokens}, host {options.host_budget}:",
        table(head, rows_of(trained, "all")),
        f"A token of {options.generation_model}, host {options.generation_host}:",
        table(head, rows_of(generated, "all")),
        table(["", "instead"], meaning),
    ]
    print("", *parts, sep="\n\n")
    if options.json:
        readings = {"training": raw(trained.values()), "generation": raw(generated.values())}
        write_json(options.json, {"machine": about, **readings})
    if options.report:
        given = ["DIR" if "/" in argument else argument for argument in sys.argv[1:]]
        shown = " ".join(["python benchmarks/ablation.py", *given])
        print(write_report("ablation", "Each idea off, one at a time", shown, parts, about))


if __name__ == "__main__":
    main()
