"""A model whose states are many times the memory: its step over the roofline max(compute, moved bytes / disk speed).

GPT-2 1.3B trains from disk in a memory control group of 3 GiB (cgroup v1). Computing alone can't be measured with the
whole model where memory is less than its states; so two models with fewer of the same blocks run with everything on the
host, forward, backward and update, and the time of the whole is the line through both. Disk speeds are fio's. ::

    python benchmarks/large.py --directory /nvme --json large.json
"""

from __future__ import annotations

import argparse
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


def main() -> None:
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    about = machine()
    common: dict[str, Any] = {
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 1,
        "steps": options.steps,
        "loss_slice": 128,
    }
    in_memory = {
        name: {**common, "model": name, "contender": "outcore, host", "budget": {"host": "9GiB"}}
        for name in SHALLOW
    }
    from_disk = {
        **common,
        "model": MODEL,
        "contender": "outcore, never whole",
        "budget": {"host": options.host},
    }
    with memory_group(parse_size(options.group)) as group:
        if group is None:
            raise SystemExit("this measurement needs a memory control group")
        scores = take_turns({MODEL: from_disk}, Place(options.directory, options.threads, group), 1)
    scores |= take_turns(in_memory, Place(options.directory, options.threads), 1)
    speeds = disk_speeds(options.directory, 1 << 30)
    found: dict[str, float] = {}
    if speeds and all(score.turns for score in scores.values()):
        moved = scores[MODEL].turns[0]["moved"]
        found = {
            "step_s": scores[MODEL].median("seconds"),
            "compute_s": whole(scores),
            "disk_s": sum(moved[link] / speed for link, speed in speeds.items()),
            **{f"{link}_gb": moved[link] / 1e9 for link in speeds},
            **{f"{link}_gb_per_s": speed / 1e9 for link, speed in speeds.items()},
        }
        found["step_over_roofline"] = found["step_s"] / max(found["compute_s"], found["disk_s"])
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
