"""outcore beside its peers on a machine without an accelerator: the same model, data and precision, in turn.

Each turn is a process of its own, all under one memory control group (cgroup v1; without permission they run without
a limit, and it says so). Contenders are plain torch, DeepSpeed ZeRO-3 offloading to host and to disk, FSDP2 with
``CPUOffloadPolicy``, and for generation accelerate's disk ``device_map``. Those that are not installed are left out;
DeepSpeed may live in an environment of its own, which must see the same torch. ::

    python benchmarks/peers.py --directory /nvme --quick --json peers.json
    python benchmarks/peers.py --directory /nvme --rounds 5 --deepspeed-python /opt/peers/bin/python --report

outcore computes the loss in slices and keeps the logits in bf16 meanwhile (``--logits recompute`` where they are not to
exist whole: a fourth product of the head beside its three; ``--loss-slice 0`` and ``--host-loss-slice 0`` for a loss as
one, as its peers have it). They are given the settings that serve them best, and have none for this.

The roofline of a step on disk is the larger of what the step takes with everything on the host, and the bytes it
moved over the speeds that fio reaches in the same directory.

On a machine that does other work as well give ``--threads 1``: a team of OpenMP threads spins while it waits for one
that is not running, which doubles the processor time of a step here, though not of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from disk import Fio
from outcore.memory.sizes import format_size, parse_size
from sides.generation import forget_pages, write_weights
from sides.group import memory_group
from sides.report import machine, peak, raw, spread, table, training_rows, write_json, write_report
from sides.turns import Place, Score, take_turns

HOST = {"host": "6GiB"}
"""Room for everything: no disk is used."""

BOUND = "compute"
"""No contender: forward and backward of bf16 weights, and nothing else. Nobody can be faster than that."""


def has(python: str, package: str) -> bool:
    """Whether an interpreter finds a package."""
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def contenders(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each is asked, those that are here; prints what was found."""
    common = {
        "model": options.model,
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": options.warm,
        "steps": options.steps,
    }
    names = ["outcore, host", "torch", "fsdp2", "outcore, disk"]
    if has(options.deepspeed_python, "deepspeed"):
        names += ["deepspeed, host", "deepspeed, disk"]
    else:
        print("deepspeed: not found (--deepspeed-python names the interpreter that has it)")
    names = [name for name in names if not options.only or name.split(",")[0] in options.only]
    print("found:", "; ".join(names))
    names.append(BOUND)
    logits = {"logits": options.logits}
    disk = {"budget": {"host": options.host_budget}, "loss_slice": options.loss_slice or None, **logits}
    host = {"budget": HOST, "loss_slice": options.host_loss_slice or None, **logits}
    asked = {
        name: {**common, "contender": name, **(disk if name == "outcore, disk" else host)} for name in names
    }
    for name in names if options.own_products else ():
        asked[name]["own_products"] = not name.startswith("outcore")
    return asked


def disk_speeds(folder: Path, size: int) -> dict[str, float] | None:
    """Bytes per second of fio, read and write, medians of five; ``None`` where it is not installed."""
    if not shutil.which("fio"):
        print("fio: not found, so there is no roofline")
        return None
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        fio = Fio(Path(temporary), size, 4 << 20, 16, "libaio", huge=True)
        return {
            "disk read": size / statistics.median(fio.read() for _ in range(5)),
            "disk write": size / statistics.median(fio.write() for _ in range(5)),
        }


def training_ratios(scores: dict[str, Score], speeds: dict[str, float] | None) -> dict[str, float]:
    """Tokens per second of outcore over those of the others (above 1 is faster), and what computing alone allows."""

    def done(name: str) -> bool:
        return name in scores and bool(scores[name].turns)

    ratios = {}
    for key, ours, other in (
        ("host_vs_torch", "outcore, host", "torch"),
        ("host_vs_deepspeed", "outcore, host", "deepspeed, host"),
        ("host_vs_fsdp2", "outcore, host", "fsdp2"),
        ("disk_vs_deepspeed", "outcore, disk", "deepspeed, disk"),
        ("bound_vs_torch", BOUND, "torch"),
        ("bound_vs_deepspeed_host", BOUND, "deepspeed, host"),
        ("bound_vs_deepspeed_disk", BOUND, "deepspeed, disk"),
    ):
        if done(ours) and done(other):
            ratios[key] = scores[other].median("seconds") / scores[ours].median("seconds")
            ratios[f"{key}_processor"] = scores[other].median("processor") / scores[ours].median("processor")
    if done("outcore, disk") and done("deepspeed, disk"):
        peaks = [scores[name].most("peak_rss") for name in ("outcore, disk", "deepspeed, disk")]
        ratios["disk_rss_vs_deepspeed"] = peaks[0] / peaks[1]
    if done("outcore, disk") and done("outcore, host") and speeds:
        moved = scores["outcore, disk"].turns[0]["moved"]
        on_disk = sum(moved[link] / speed for link, speed in speeds.items())
        roofline = max(scores["outcore, host"].median("seconds"), on_disk)
        ratios["disk_vs_roofline"] = roofline / scores["outcore, disk"].median("seconds")
        ratios["roofline_compute_s"] = scores["outcore, host"].median("seconds")
        ratios["roofline_disk_s"] = on_disk
    return ratios


def generation(options: argparse.Namespace, place: Path) -> tuple[dict[str, Score], dict[str, float], str]:
    """Weights on disk, one memory group smaller than they are, a cold page cache before each turn."""
    names = ["outcore"] + (["accelerate"] if has(sys.executable, "accelerate") else [])
    with tempfile.TemporaryDirectory(dir=place) as folder:
        nbytes = write_weights(options.generation_model, Path(folder))
        limit = min(parse_size(options.generation_group), nbytes - 1)
        common = {
            "model": options.generation_model,
            "weights": folder,
            "rows": 1,
            "tokens": 64,
            "new_tokens": options.new_tokens,
            "device": "cpu",
            "budget": {"host": options.generation_host},
        }
        what = (
            f"{options.generation_model}, bf16, {format_size(nbytes)} of weights, group of {format_size(limit)}, "
            f"{options.generation_host} of it for weights and activations"
        )
        print(f"generation: {what}")
        asked = {f"generation, {name}": {**common, "contender": name} for name in names}
        with memory_group(limit) as group:
            at = Place(place, options.threads, group)
            scores = take_turns(asked, at, options.rounds, lambda: forget_pages(Path(folder)))
    ours, other = scores["generation, outcore"], scores.get("generation, accelerate")
    ratios = {}
    if other is not None and ours.turns and other.turns:
        ratios["generation_vs_accelerate"] = other.median("seconds") / ours.median("seconds")
        ratios["generation_same_tokens"] = float(ours.turns[0]["tokens"] == other.turns[0]["tokens"])
    return scores, ratios, what


def generation_table(scores: dict[str, Score]) -> str:
    rows = [
        [
            s.name,
            spread(s.readings("seconds")),
            f"{s.median('prompt_seconds'):.2f}",
            peak(s),
        ]
        if s.turns
        else [s.name, f"failed: {s.failure}", "", ""]
        for s in scores.values()
    ]
    return table(["", "seconds per token", "first token", "peak RSS"], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps: within ten minutes")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--warm", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--own-products",
        action="store_true",
        help="on a processor without bf16 instructions: peers multiply as torch does there; without this all alike "
        "have outcore.widen_matmuls(), so that what is compared is where states are",
    )
    parser.add_argument("--host-budget", default="768MiB", help="outcore's, where states are on disk")
    parser.add_argument(
        "--loss-slice",
        type=int,
        default=32,
        help="positions of a slice of outcore's head and loss where states are on disk; 0 for all at once",
    )
    parser.add_argument("--host-loss-slice", type=int, default=32, help="the same where all is on the host")
    parser.add_argument(
        "--logits",
        choices=["keep", "recompute"],
        default="keep",
        help="what such slices do with their logits between forward and backward",
    )
    parser.add_argument("--group", default="8GiB", help="the memory control group's limit")
    parser.add_argument("--generation-model", default="gpt2-large")
    parser.add_argument("--generation-group", default="1400MiB")
    parser.add_argument("--generation-host", default="640MiB")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--no-generation", dest="generation", action="store_false")
    parser.add_argument("--no-training", dest="training", action="store_false")
    parser.add_argument("--only", nargs="*", help="contenders of training, by the first word of their names")
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.new_tokens = 2, 2, 6
    return options


def main() -> None:
    options = parse()
    about = machine()
    options.directory.mkdir(parents=True, exist_ok=True)
    speeds = disk_speeds(options.directory, 1 << 30)
    if speeds:
        about["disk"] = ", ".join(f"{link} {speed / 1e9:.2f} GB/s (fio)" for link, speed in speeds.items())
    ratios: dict[str, float] = {}
    scores: dict[str, Score] = {}
    parts = []
    if options.training:
        asked = contenders(options)
        with memory_group(parse_size(options.group)) as group:
            python = {"deepspeed": options.deepspeed_python}
            place = Place(options.directory, options.threads, group, python)
            limit = "no limit" if group is None else f"a memory group of {options.group}"
            scores |= take_turns(asked, place, options.rounds)
        ratios |= training_ratios(scores, speeds)
        own = "peers with their own products in bf16, " if options.own_products else ""
        sliced = (
            f"outcore's loss in slices of {options.loss_slice or 'all'} positions with a disk, of "
            f"{options.host_loss_slice or 'all'} without, logits: {options.logits}"
        )
        about["training"] = (
            f"{options.model}, batch {options.rows} x {options.tokens}, bf16 over fp32 masters, AdamW, norm clipped, "
            f"blocks recomputed, {sliced}, {own}{options.threads} threads, {limit}, "
            f"{options.rounds} rounds of {options.steps} steps"
        )
        rows = training_rows(scores.values(), options.rows * options.tokens)
        parts.append(table(["", "seconds per step", "tokens/s", "processor s", "peak RSS"], rows))
    if options.generation:
        found, more, about["generation"] = generation(options, options.directory)
        scores |= found
        ratios |= more
        parts.append(generation_table(found))
    parts.append(table(["", ""], [[name, f"{value:.2f}"] for name, value in ratios.items()]))
    print("", *parts, sep="\n\n")
    if options.json:
        write_json(options.json, {"machine": about, **ratios, "readings": raw(scores.values())})
    if options.report:
        shown = " ".join(["python benchmarks/peers.py", *_public(sys.argv[1:])])
        print(write_report("peers", "outcore beside its peers", shown, parts, about))


def _public(arguments: list[str]) -> list[str]:
    """The command without this machine's paths."""
    return ["DIR" if "/" in argument else argument for argument in arguments]


if __name__ == "__main__":
    main()
