"""outcore beside its peers on several ranks of this machine, all of them on gloo: the same model, data and precision.

Each turn is a group of processes of its own, each with an equal part of the cores. Contenders are outcore with
``Sharding("parameters")``, FSDP2 with ``CPUOffloadPolicy`` on a CPU mesh, and DeepSpeed ZeRO-3 offloading to the host.
What is kept holds gathered parameters from forward to backward: outcore with ``Sharding("gradients")``, FSDP2 with
``reshard_after_forward=False``; DeepSpeed does so by default, with a model of this size. FSDP2 sends and sums gradients
in fp32 (in bf16 without ``--quick``), outcore sends bf16 and sums in fp32.
``compute`` is none of them: forward and backward of bf16 weights on each rank by itself, which nobody can be faster
than.
Those that are not installed are left out; DeepSpeed may live in an environment of its own, which must see the same
torch.

DeepSpeed compiles its operators when it is first used, for minutes. A process that is killed meanwhile leaves a file
``lock`` in ``TORCH_EXTENSIONS_DIR``, on which all later ones wait for ever: so do it once with ``--prepare``. ::

    python benchmarks/peers_ranks.py --deepspeed-python /opt/peers/bin/python --prepare
    python benchmarks/peers_ranks.py --quick --json peers_ranks.json
    python benchmarks/peers_ranks.py --rounds 5 --deepspeed-python /opt/peers/bin/python --report

A step takes as long as its slowest rank, and as much processor time as all of them. Memory is that of the rank that
takes most, while it trains and while it is made, with the 0.4 GiB of torch and its libraries.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from outcore.memory.sizes import format_size
from peers import has
from sides.report import machine, raw, spread, table, write_json, write_report
from sides.turns import Place, Score, take_turns

OURS = "outcore, host"
BOUND = "compute"


def contenders(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each is asked, those that are here; prints what was found."""
    common = {
        "model": options.model,
        "rows": options.rows,
        "tokens": options.tokens,
        "device": "cpu",
        "warm": 2,
        "steps": options.steps,
        "budget": {"host": options.host_budget},
    }
    names = [OURS, "outcore, kept", "fsdp2", "fsdp2, kept", *([] if options.quick else ["fsdp2, bf16 sums"])]
    if has(options.deepspeed_python, "deepspeed"):
        names.append("deepspeed, host")
    else:
        print("deepspeed: not found (--deepspeed-python names the interpreter that has it)")
    print("found:", "; ".join(names))
    names.append(BOUND)
    return {name: {**common, "contender": name} for name in names}


def ratios(scores: dict[str, Score]) -> dict[str, float]:
    """Tokens per second of outcore over those of the others (above 1 is faster), and its memory over theirs.

    Of what is only computed the same over each: how much faster than it anyone could be.
    """
    found = {}
    done = {name.replace(",", "").replace(" ", "_"): score for name, score in scores.items() if score.turns}
    for own, ours in done.items():
        for other, score in done.items():
            if own.startswith("outcore") and not other.startswith("outcore") and other != BOUND:
                pair = f"{own}_vs_{other}"
                found[f"{pair}_tokens"] = score.median("seconds") / ours.median("seconds")
                found[f"{pair}_processor"] = score.median("processor") / ours.median("processor")
                found[f"{pair}_peak"] = ours.most("peak_steps") / score.most("peak_steps")
    if BOUND in done:
        least = done[BOUND].median("seconds")
        found |= {
            f"{BOUND}_vs_{name}_tokens": score.median("seconds") / least
            for name, score in done.items()
            if name != BOUND
        }
    return found


def rows(scores: dict[str, Score], tokens: int) -> list[list[str]]:
    """One row a contender; or why there is none."""
    found = []
    for score in scores.values():
        if not score.turns:
            found.append([score.name, f"failed: {score.failure}", "", "", "", ""])
            continue
        peaks = [format_size(int(score.most(what))) for what in ("peak_steps", "peak_rss")]
        wall, processor = spread(score.readings("seconds")), f"{score.median('processor'):.2f}"
        found.append([score.name, wall, f"{tokens / score.median('seconds'):.0f}", processor, *peaks])
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps: within seven minutes")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2, help="of each rank")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="counted steps in a turn")
    parser.add_argument("--host-budget", default="4GiB", help="outcore's, of each rank")
    parser.add_argument("--patience", type=float, help="seconds that a turn may take")
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--prepare", action="store_true", help="let DeepSpeed compile, and measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 2
    return options


def main() -> None:
    options = parse()
    about = machine()
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    with tempfile.TemporaryDirectory() as disk:
        python = {"deepspeed": options.deepspeed_python}
        patience = options.patience or (3600.0 if options.prepare else 100.0 if options.quick else 600.0)
        place = Place(Path(disk), threads, python=python, timeout=patience, ranks=options.ranks)
        asked = contenders(options)
        if options.prepare:
            last = [name for name in asked if name != BOUND][-1]
            take_turns({last: {**asked[last], "model": "gpt2-tiny", "tokens": 16}}, place, 1)
            return
        scores = take_turns(asked, place, options.rounds)
    about["training"] = (
        f"{options.model}, {options.ranks} ranks of {threads} threads, batch {options.ranks} x {options.rows} x "
        f"{options.tokens}, bf16 over fp32 masters, AdamW, norm clipped, blocks recomputed, {options.rounds} rounds of "
        f"{options.steps} steps"
    )
    found = ratios(scores)
    head = [
        "",
        "seconds per step",
        "tokens/s",
        "processor s",
        "peak RSS of a rank, training",
        "peak RSS of a rank",
    ]
    parts = [
        table(head, rows(scores, options.ranks * options.rows * options.tokens)),
        table(["", ""], [[name, f"{value:.2f}"] for name, value in found.items()]),
    ]
    print("", *parts, sep="\n\n")
    if options.json:
        write_json(options.json, {"machine": about, **found, "readings": raw(scores.values())})
    if options.report:
        shown = "python benchmarks/peers_ranks.py " + " ".join(
            "PYTHON" if "/" in argument else argument for argument in sys.argv[1:]
        )
        print(
            write_report(
                "peers-ranks", "outcore beside its peers on several ranks", shown.strip(), parts, about
            )
        )


if __name__ == "__main__":
    main()
