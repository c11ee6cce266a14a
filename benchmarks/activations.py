"""What each way with activations takes on the host: bytes by the ledger, the smallest budget, what moves to the disk.

    python benchmarks/activations.py --model gpt2 --batch-size 8 --seq-len 256 --disk /nvme

One step each, with the smallest host budget that the way needs by `rehearse`, and what states take beside it on the
disk. Peaks are the ledger's, and CPU seconds are those of all threads: both are the same on a busy machine.
"""

from __future__ import annotations

import argparse
import time

import torch

import outcore
from outcore.integrations.transformers import build
from outcore.memory.ledger import Ledger
from outcore.memory.sizes import format_size
from outcore.offloaded import engine_of
from outcore.planning.rehearsal import rehearse

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
    activations = outcore.Activations(way)  # type: ignore[arg-type]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--only-plan", action="store_true", help="smallest budgets by rehearsal, no run")
    asked = parser.parse_args()
    for way in asked.ways:
        run(way, asked)


if __name__ == "__main__":
    main()
