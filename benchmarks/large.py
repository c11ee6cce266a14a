"""A model whose states are many times the memory: its step over the roofline max(compute, moved bytes / disk speed).

GPT-2 1.3B trains from disk in a memory control group of 3 GiB (cgroup v1). Computing alone can't be measured with the
whole model where memory is less than its states; so two models with fewer of the same blocks run with everything on the
host, forward, backward and update, and the time of the whole is the line through both. Disk speeds are fio's. ::

    python benchmarks/large.py --directory /nvme --json large.json
    python benchmarks/large.py --directory /nvme --only disk --json disk.json      # or in two parts
    python benchmarks/large.py --directory /nvme --only compute --readings disk.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from outcore.memory.sizes import format_size, parse_size
from peers import disk_speeds
from sides.group import memory_group
from sides.models import MODELS
from sides.report import machine, raw, spread, table, write_json
from sides.turns import Place, Score, take_turns

MODEL = "gpt2-1.3b"
SHALLOW = ("gpt2-1.3b, 2 blocks", "gpt2-1.3b, 5 blocks")


def blocks(model: str) -> int:
    return int(MODELS[model].config["n_layer"])


def whole(scores: dict[str, Score]) -> float:
    """Seconds of a step of all blocks, by those of few."""
    (low, few), (high, more) = ((blocks(name), scores[name].median("seconds")) for name in SHALLOW)
    return few + (more - few) * (blocks(MODEL) - low) / (high - low)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--group", default="3GiB", help="the memory control group's limit")
    parser.add_argument("--host", default="1800MiB", help="of it for chunks and activations")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=("disk", "compute"), help="the whole model, or the shallow ones")
    parser.add_argument("--readings", nargs="*", type=Path, default=[], help="files of --json to go with it")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run(options: argparse.Namespace) -> dict[str, Score]:
    """The whole model from disk in the group, and the shallow ones without it."""
    common: dict[str, Any] = {
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 1,
        "steps": options.steps,
        "loss_slice": 128,
    }
    scores: dict[str, Score] = {}
    if options.only != "compute":
        asked = {
            **common,
            "model": MODEL,
            "contender": "outcore, never whole",
            "budget": {"host": options.host},
        }
        with memory_group(parse_size(options.group)) as group:
            if group is None:
                raise SystemExit("this measurement needs a memory control group")
            scores |= take_turns({MODEL: asked}, Place(options.directory, options.threads, group), 1)
    if options.only != "disk":
        budget = {"host": "9GiB"}
        shallow = {
            name: {**common, "model": name, "contender": "outcore, host", "budget": budget}
            for name in SHALLOW
        }
        scores |= take_turns(shallow, Place(options.directory, options.threads), 1)
    return scores


def earlier(files: list[Path]) -> dict[str, Score]:
    scores = {}
    for file in files:
        for name, found in json.loads(file.read_text("utf-8"))["readings"].items():
            scores[name] = Score(name, found["turns"], found["failure"])
    return scores


def against_roofline(scores: dict[str, Score], speeds: dict[str, float]) -> dict[str, float]:
    moved = scores[MODEL].turns[0]["moved"]
    found = {
        "step_s": scores[MODEL].median("seconds"),
        "compute_s": whole(scores),
        "disk_s": sum(moved[link] / speed for link, speed in speeds.items()),
        **{f"{link}_gb": moved[link] / 1e9 for link in speeds},
        **{f"{link}_gb_per_s": speed / 1e9 for link, speed in speeds.items()},
    }
    return {**found, "step_over_roofline": found["step_s"] / max(found["compute_s"], found["disk_s"])}


def main() -> None:
    options = parse()
    about = machine()
    scores = earlier(options.readings) | run(options)
    speeds = disk_speeds(options.directory, 1 << 30)
    done = {name for name, score in scores.items() if score.turns}
    found = against_roofline(scores, speeds) if speeds and done == {MODEL, *SHALLOW} else {}
    rows = [
        [score.name, spread(score.readings("seconds")), format_size(int(score.most("peak_rss")))]
        if score.turns
        else [score.name, f"failed: {score.failure}", ""]
        for score in scores.values()
    ]
    print("", table(["", "seconds per step", "peak RSS"], rows), sep="\n")
    print("", table(["", ""], [[name, f"{value:.2f}"] for name, value in found.items()]), sep="\n")
    if options.json:
        write_json(options.json, {"machine": about, **found, "readings": raw(scores.values())})


if __name__ == "__main__":
    main()
