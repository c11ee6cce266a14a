"""What each way with activations takes on the host: bytes by the ledger, the smallest budget, what moves to the disk.

    python benchmarks/activations.py --model gpt2 --batch-size 8 --seq-len 256 --disk /nvme

One step each, with the smallest host budget that the way needs by `rehearse`, and what states take beside it on the
disk. Peaks are the ledger's, and CPU seconds are those of all threads: both are the same on a busy machine.

With `--time` the ways take turns under one budget, each turn in a process of its own:

    python benchmarks/activations.py --disk /nvme --time --host 1536MiB --rounds 2 --json activations.json
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import outcore
from outcore.integrations.transformers import build
from outcore.memory.ledger import Ledger
from outcore.memory.sizes import format_size
from outcore.offloaded import engine_of
from outcore.planning.rehearsal import rehearse
from sides.report import machine, peak, raw, spread, table, write_json
from sides.turns import Place, take_turns

WAYS = ("keep", "recompute", "offload", "recompute+offload")


class Levels:
    """An observer that keeps the most bytes of activations on each tier; on the host, of those that are in use."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def level(self, tier: str, kind: str, nbytes: int) -> None:
        if kind == "activations":
            self.most[tier] = max(self.most.get(tier, 0), nbytes)

    def mark(self, where: object = None) -> None:
        return None

    def span(self, *told: object) -> None:
        """Times are not looked at."""


def run(way: str, asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    built = build(asked.model, training=True)
    ids = torch.randint(0, built.config.vocab_size, (asked.batch_size, asked.seq_len))
    batch = {"input_ids": ids, "labels": ids}
    activations = outcore.Activations(way, loss_slice=asked.loss_slice or None)  # type: ignore[arg-type]
    optimizer = outcore.AdamW(built.model.parameters(), lr=1e-4)
    needs = rehearse(built.model, optimizer, batch, on_host=True, activations=activations)
    least = needs.least.host
    print(
        f"{way}: smallest host budget {format_size(least)}, beside it on disk {format_size(needs.least.disk)}"
    )
    if asked.only_plan:
        return
    host = least * 105 // 100
    budget = outcore.Budget(host=host, disk=asked.disk)
    outcore.offload(built.model, optimizer, budget=budget, activations=activations)
    engine = engine_of(built.model)
    engine.gauge.expect(needs.activations)
    levels = Levels()
    try:
        for number in range(asked.steps):
            if number == asked.steps - 1:
                engine.ledger.reset_peaks()
                Ledger.observe(engine.ledger, levels)  # type: ignore[arg-type]
            before, cpu = outcore.snapshot(built.model), time.process_time()
            loss = built.model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.settle()
            cpu, after = time.process_time() - cpu, outcore.snapshot(built.model)
        moved = {link: after.moved[link] - before.moved[link] for link in ("disk read", "disk write")}
        print(
            f"  budget {format_size(host)}; peak {format_size(after.peak['host'])}, of which activations "
            f"{format_size(levels.most.get('host', 0))} (disk {format_size(levels.most.get('disk', 0))}); read "
            f"{format_size(moved['disk read'])}, written {format_size(moved['disk write'])}; {cpu:.1f} s CPU; "
            f"loss {loss.item():.6f}",
            flush=True,
        )
    finally:
        outcore.release(built.model)


def in_turn(asked: argparse.Namespace) -> None:
    """Steps of each way under one budget, A B A B."""
    about = machine()
    common = {
        "model": asked.model,
        "rows": asked.batch_size,
        "tokens": asked.seq_len,
        "device": "cpu",
        "warm": 2,
        "steps": asked.steps,
        "budget": {"host": asked.host},
        "loss_slice": asked.loss_slice or None,
    }
    given = {way: {**common, "contender": f"outcore, {way} activations"} for way in asked.ways}
    scores = take_turns(given, Place(Path(asked.disk), os.cpu_count() or 1), asked.rounds)
    rows = []
    for way, score in scores.items():
        if not score.turns:
            rows.append([way, f"failed: {score.failure}", *[""] * 5])
            continue
        turn = score.turns[0]
        links = " / ".join(f"{turn['moved'][link] / 1e6:,.0f}" for link in ("disk read", "disk write"))
        held = [format_size(int(turn["most_held"][tier])) for tier in ("host", "disk")]
        seconds, processor = spread(score.readings("seconds")), f"{score.median('processor'):.2f}"
        rows.append([way, seconds, processor, links, *held, peak(score)])
    head = ["", "seconds", "processor s", "read / written, MB", "host, by the ledger", "disk", "peak RSS"]
    print("", table(head, rows), sep="\n")
    if asked.json:
        write_json(asked.json, {"machine": about, "readings": raw(scores.values())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--only-plan", action="store_true", help="smallest budgets by rehearsal, no run")
    parser.add_argument("--loss-slice", type=int, default=128, help="positions of a slice; 0 for all at once")
    parser.add_argument("--time", action="store_true", help="the ways in turn, under one budget")
    parser.add_argument("--host", default="1536MiB", help="that budget")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="the readings of --time")
    asked = parser.parse_args()
    if asked.time:
        in_turn(asked)
        return
    for way in asked.ways:
        run(way, asked)


if __name__ == "__main__":
    main()
