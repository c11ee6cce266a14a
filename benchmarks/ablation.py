"""Each idea off, one at a time: what a step, or a token, then costs in time, processor time, bytes moved and memory.

Settings take turns, each in a process of its own. An idea is turned off by putting its predecessor in its place
(``sides/without.py``), so that the library has no switches for it, or by asking for what was there before it. Times on
a machine with other work say little; bytes do. ::

    python benchmarks/ablation.py --directory /nvme --quick --json ablation.json
    python benchmarks/ablation.py --directory /nvme --model gpt2 --rounds 3 --report
    python benchmarks/ablation.py --directory /nvme --readings first.json second.json --report   # of earlier runs
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sides.bars import write_bars
from sides.generation import forget_pages, write_weights
from sides.report import FOLDER, machine, peak, raw, spread, table, write_json, write_report
from sides.turns import Place, Score, take_turns
from sides.without import WITHOUT, WITHOUT_GENERATING

MB = 1e6
BASE = "all"

OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "without loss slices": ("logits of the whole batch at once", {"loss_slice": None}),
    "slices": ("the batch in slices of one row", {"contender": "outcore, slices"}),
    "micro-batches": (
        "each row by itself, summed: what slices are for",
        {"contender": "outcore, micro-batches"},
    ),
    "offloaded activations": (
        "blocks offload what they save, none is recomputed",
        {"contender": "outcore, offload activations"},
    ),
    "bf16 moments": ("4 bytes per parameter less, not exact", {"contender": "outcore, bf16 moments"}),
    "8-bit moments": ("5.97 bytes per parameter less, not exact", {"contender": "outcore, 8-bit moments"}),
}
"""What is asked for in place of what a run is made of: in words, and how it differs."""

INEXACT = ("bf16 moments", "8-bit moments")
"""Settings that a quick run leaves out: what they are worth is `moments.py`'s matter."""


def training(options: argparse.Namespace) -> dict[str, Score]:
    """A run on the disk with all ideas, and without each."""
    common = {
        "contender": "outcore, disk",
        "model": options.model,
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 2,
        "steps": options.steps,
        "budget": {"host": options.host_budget},
        "loss_slice": options.loss_slice,
    }
    asked: dict[str, dict[str, Any]] = {BASE: common}
    asked |= {f"without {name}": {**common, "without": name} for name in WITHOUT}
    asked |= {name: {**common, **other} for name, (_, other) in OTHERWISE.items()}
    if options.quick:
        asked = {name: given for name, given in asked.items() if name not in INEXACT}
    if options.only:
        asked = {name: given for name, given in asked.items() if name == BASE or name in options.only}
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
        asked: dict[str, dict[str, Any]] = {BASE: common}
        asked |= {f"without {name}": {**common, "without": name} for name in WITHOUT_GENERATING}
        at = Place(options.directory, options.threads)
        return take_turns(asked, at, options.rounds, lambda: forget_pages(Path(folder)))


def pooled(files: list[Path], kind: str) -> dict[str, Score]:
    """The turns of earlier runs, one file after the other."""
    scores: dict[str, Score] = {}
    for file in files:
        for name, found in json.loads(file.read_text("utf-8"))[kind].items():
            score = scores.setdefault(name, Score(name))
            score.turns += found["turns"]
            score.failure = score.failure or found["failure"]
    return scores


def rows_of(scores: dict[str, Score]) -> list[list[str]]:
    rows = []
    for name, score in scores.items():
        if not score.turns:
            rows.append([name, f"failed: {score.failure}", "", "", "", ""])
            continue
        moved = score.turns[0]["moved"]
        ratio = score.median("seconds") / scores[BASE].median("seconds") if scores[BASE].turns else 0.0
        disk = f"{moved['disk read'] / MB:,.0f} / {moved['disk write'] / MB:,.0f}"
        known = [second for turn in score.turns for second in turn.get("processor", ())]
        processor = f"{statistics.median(known):.2f}" if known else ""
        rows.append([name, spread(score.readings("seconds")), f"{ratio:.2f}", processor, disk, peak(score)])
    return rows


def readings_of(scores: dict[str, Score]) -> list[list[str]]:
    """All of them, in order."""
    return [
        [name, "; ".join(", ".join(f"{s:.2f}" for s in turn["seconds"]) for turn in score.turns)]
        for name, score in scores.items()
    ]


def bars_of(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    """Time and disk bytes over those of the run that has all ideas."""

    def nbytes(score: Score) -> float:
        moved = score.turns[0]["moved"]
        return float(moved["disk read"] + moved["disk write"])

    base = scores[BASE]
    return {
        name: {"seconds": s.median("seconds") / base.median("seconds"), "bytes": nbytes(s) / nbytes(base)}
        for name, s in scores.items()
        if s.turns and name != BASE
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--quick", action="store_true", help="one round of two steps: within seven minutes")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--host-budget", default="768MiB")
    parser.add_argument("--loss-slice", type=int, default=128, help="positions of a slice of head and loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="settings of training to compare with the whole")
    parser.add_argument("--generation-model", default="gpt2-large")
    parser.add_argument("--generation-host", default="640MiB")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--no-training", dest="training", action="store_false")
    parser.add_argument("--no-generation", dest="generation", action="store_false")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--readings", nargs="*", type=Path, help="files of --json: nothing is run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.new_tokens = 1, 2, 8
    return options


def parts_of(
    options: argparse.Namespace, trained: dict[str, Score], generated: dict[str, Score]
) -> list[str]:
    head = ["", "seconds", "of all", "processor s", "disk read / written, MB", "peak RSS"]
    meaning = [[f"without {name}", what] for name, (what, _) in (WITHOUT | WITHOUT_GENERATING).items()]
    meaning += [[name, what] for name, (what, _) in OTHERWISE.items()]
    parts = []
    if trained:
        batch = f"batch {options.rows} x {options.tokens}, host {options.host_budget}"
        parts += [f"A step of {options.model}, {batch}:", table(head, rows_of(trained))]
    if generated:
        what = f"A token of {options.generation_model}, host {options.generation_host}:"
        parts += [what, table(head, rows_of(generated))]
    parts += ["What is there instead:", table(["", "instead"], meaning)]
    for scores in (trained, generated):
        if scores:
            parts += ["All readings in seconds, turns apart:", table(["", ""], readings_of(scores))]
    return parts


def write_page(options: argparse.Namespace, parts: list[str], about: Mapping[str, str], drawn: Any) -> None:
    given = ["DIR" if "/" in argument else argument for argument in sys.argv[1:]]
    if "--readings" in given:
        given = ["--directory", "DIR", "--quick", "--json", "FILE"]
    shown = " ".join(["python benchmarks/ablation.py", *given])
    path = write_report("ablation", "Each idea off, one at a time", shown, parts, about)
    with path.open("a", encoding="utf-8") as file:
        for kind, bars in drawn.items():
            picture = FOLDER / f"{path.stem}-{kind}.svg"
            write_bars(picture, f"Each idea off, {kind}: over the whole", bars)
            file.write(f"\n![{kind}]({picture.name})\n")
    print(path)


def main() -> None:
    options = parse()
    if options.readings:
        about = json.loads(options.readings[0].read_text("utf-8"))["machine"]
        trained, generated = (pooled(options.readings, kind) for kind in ("training", "generation"))
    else:
        about = machine()
        trained = training(options) if options.training else {}
        generated = generating(options) if options.generation else {}
    parts = parts_of(options, trained, generated)
    print("", *parts, sep="\n\n")
    if options.json:
        readings = {"training": raw(trained.values()), "generation": raw(generated.values())}
        write_json(options.json, {"machine": about, **readings})
    if options.report:
        kinds = {"training": trained, "generation": generated}
        drawn = {kind: bars_of(scores) for kind, scores in kinds.items() if scores and scores[BASE].turns}
        write_page(options, parts, about, drawn)


if __name__ == "__main__":
    main()
