"""Time and memory of a step against the size of the model, and against the host's budget.

Each setting is a process of its own. Sizes run twice, with everything on the host and with states on disk; budgets run
from a little above the least that works to all that is asked for. Plots are written as SVG beside the report. ::

    python benchmarks/scaling.py --directory /nvme --quick --json scaling.json
    python benchmarks/scaling.py --directory /nvme --report
    python benchmarks/scaling.py --directory /nvme --quick --readings scaling.json --report   # of an earlier run
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outcore.memory.sizes import format_size
from sides.models import MODELS
from sides.plot import Points, write_plot
from sides.report import FOLDER, machine, peak, raw, spread, table, write_json, write_report
from sides.turns import Place, Score, take_turns

MiB = 1 << 20
SIZES = ("gpt2-7m", "gpt2-17m", "gpt2-34m", "gpt2", "gpt2-medium")
SHARES = (1.15, 0.8, 0.6, 0.45, 0.33)
"""Of what the states of the model take."""
SLACK = 96 * MiB
"""What a budget has beside a share of the states: room for activations."""


def parameters(model: str) -> int:
    """How many a GPT-2 of this shape has, its embedding counted once."""
    config = MODELS[model].config
    width, layers = config["n_embd"], config["n_layer"]
    return (config["vocab_size"] + config["n_positions"]) * width + layers * 12 * width * width


def states(model: str) -> int:
    """Bytes of parameters, masters, moments and gradients with AdamW in bf16."""
    return 14 * parameters(model)


def ask(options: argparse.Namespace, model: str, host: int, disk: bool) -> dict[str, Any]:
    return {
        "contender": "outcore, disk" if disk else "outcore, host",
        "model": model,
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 2,
        "steps": options.steps,
        "budget": {"host": f"{host}"},
        "loss_slice": 128,
    }


def sizes(options: argparse.Namespace) -> dict[str, Score]:
    asked: dict[str, dict[str, Any]] = {}
    for model in options.sizes:
        asked[f"{model}, host"] = ask(options, model, 2 * states(model) + 512 * MiB, False)
        asked[f"{model}, disk"] = ask(options, model, states(model) * 45 // 100 + SLACK, True)
    return take_turns(asked, Place(options.directory, options.threads), options.rounds)


def budgets(options: argparse.Namespace) -> dict[str, Score]:
    asked = {}
    for share in SHARES:
        host = int(states(options.model) * share) + SLACK
        asked[f"{host // MiB} MiB"] = ask(options, options.model, host, True)
    return take_turns(asked, Place(options.directory, options.threads), options.rounds)


def read(file: Path) -> tuple[dict[str, str], dict[str, Score], dict[str, Score]]:
    """The machine and the turns of an earlier run."""
    found = json.loads(file.read_text("utf-8"))
    by_size, by_budget = (
        {name: Score(name, said["turns"], said["failure"]) for name, said in found[kind].items()}
        for kind in ("sizes", "budgets")
    )
    return found["machine"], by_size, by_budget


def rows_of(scores: Mapping[str, Score]) -> list[list[str]]:
    rows = []
    for name, score in scores.items():
        if not score.turns:
            rows.append([name, f"failed: {score.failure}", "", "", ""])
            continue
        moved = score.turns[0]["moved"]
        disk = f"{format_size(int(moved['disk read']))} / {format_size(int(moved['disk write']))}"
        rows.append(
            [name, spread(score.readings("seconds")), f"{score.median('processor'):.2f}", disk, peak(score)]
        )
    return rows


def plots(
    options: argparse.Namespace, by_size: dict[str, Score], by_budget: dict[str, Score], stem: Path
) -> list[str]:
    """Write the pictures; gives their names."""
    written = []

    def draw(name: str, title: str, across: str, up: str, lines: dict[str, Points]) -> None:
        drawn = {key: points for key, points in lines.items() if points}
        if drawn:
            path = stem.with_name(f"{stem.name}-{name}.svg")
            write_plot(path, title, across, up, drawn)
            written.append(path.name)

    def sized(tier: str, what: str, unit: float) -> Points:
        found = ((model, by_size[f"{model}, {tier}"]) for model in options.sizes)
        return [(parameters(model) / 1e6, score.median(what) / unit) for model, score in found if score.turns]

    tiers = ("host", "disk")
    across = "millions of parameters"
    draw("size-time", "A step by size", across, "seconds", {t: sized(t, "seconds", 1) for t in tiers})
    draw(
        "size-processor",
        "Its work by size",
        across,
        "processor s",
        {t: sized(t, "processor", 1) for t in tiers},
    )
    draw("size-memory", "Peak RSS by size", across, "MiB", {t: sized(t, "peak_rss", MiB) for t in tiers})
    done = [(float(name.split()[0]), score) for name, score in by_budget.items() if score.turns]
    draw(
        "budget-time",
        f"A step of {options.model} by budget",
        "host budget, MiB",
        "seconds",
        {
            "wall": [(x, s.median("seconds")) for x, s in done],
            "processor": [(x, s.median("processor")) for x, s in done],
        },
    )
    draw(
        "budget-bytes",
        f"Bytes a step of {options.model} moves by budget",
        "host budget, MiB",
        "MB",
        {
            link: [(x, s.turns[0]["moved"][link] / 1e6) for x, s in done if s.turns[0]["moved"][link]]
            for link in ("disk read", "disk write")
        },
    )
    return written


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument(
        "--quick", action="store_true", help="four sizes, one round of two steps: within seven minutes"
    )
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--model", default="gpt2", choices=list(SIZES), help="of the budgets")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--readings", type=Path, help="a file of --json: nothing is run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.sizes = list(SIZES[:4])
        options.rounds, options.steps = 1, 2
    return options


def main() -> None:
    options = parse()
    if options.readings:
        about, by_size, by_budget = read(options.readings)
    else:
        about, by_size, by_budget = machine(), sizes(options), budgets(options)
    head = ["", "seconds", "processor s", "disk read / written", "peak RSS"]
    batch = f"batch {options.rows} x {options.tokens}"
    parts = [
        f"By size, {batch}; on disk: a budget of 45 % of the states and {format_size(SLACK)}:",
        table(head, rows_of(by_size)),
        f"{options.model} by budget, {batch}, {format_size(states(options.model))} of states and gradients:",
        table(head, rows_of(by_budget)),
    ]
    print("", *parts, sep="\n\n")
    if options.json:
        readings = {"sizes": raw(by_size.values()), "budgets": raw(by_budget.values())}
        write_json(options.json, {"machine": about, **readings})
    if options.report:
        given = ["DIR" if "/" in argument else argument for argument in sys.argv[1:]]
        if options.readings:
            given = ["--directory", "DIR", "--quick", "--json", "FILE"]
        shown = " ".join(["python benchmarks/scaling.py", *given])
        path = write_report("scaling", "Time and memory against size and budget", shown, parts, about)
        drawn = plots(options, by_size, by_budget, FOLDER / path.stem)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(f"![{name}]({name})" for name in drawn) + "\n")
        print(path)


if __name__ == "__main__":
    main()
