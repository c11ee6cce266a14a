"""Two ranks of which one is throttled: a step with even parts, with parts by speed, and as the ideal division has it.

    python benchmarks/uneven.py [--throttle 3] [--rows 320] [--steps 8] [--rounds 3] [--sharding none] [--json FILE]

The slow rank is stopped by a signal for most of each 12 ms, as a machine that is that much slower would be late with
everything. Even parts and parts by speed take turns. The ideal is the batch by the sum of both speeds, as they were
measured in the steps with even parts; what ranks say to each other comes on top of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import outcore
from outcore.integrations.transformers import build
from outcore.model.shares import Split, busy_by
from outcore.offloaded import engine_of

SLICE = 0.004
"""Seconds for which the slow rank runs before it is stopped again."""

BEFORE = 6
"""Steps of each kind that are not measured: activations are, and speeds become known."""


def train(rank: int, options: argparse.Namespace, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    built = build(options.model, training=True)
    optimizer = outcore.AdamW(built.model.parameters(), lr=1e-4)
    outcore.offload(
        built.model,
        optimizer,
        budget=outcore.Budget(host=options.host_memory),
        device="cpu",
        sharding=outcore.Sharding(options.sharding),
    )
    engine = engine_of(built.model)
    busy = busy_by(engine.ledger)
    splits: tuple[Split, ...] = ("even", "speed")
    kinds = {split: outcore.shares(built.model, split) for split in splits}
    ids = torch.randint(0, built.vocabulary, (options.rows, options.seq_len))
    found: dict[str, list[tuple[float, float, int]]] = {split: [] for split in kinds}

    def step(split: str) -> None:
        start, worked = time.perf_counter(), busy()
        with kinds[split].part(ids) as part:
            optimizer.backward(part.weigh(built.model(input_ids=part.batch, labels=part.batch).loss))
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()
        engine.ranks.agree("the end of a step")
        found[split].append((time.perf_counter() - start, busy() - worked, part.rows))

    for _ in range(BEFORE):
        for split in kinds:
            step(split)
    for steps in found.values():
        steps.clear()
    for _ in range(options.rounds):
        for split in kinds:
            for _ in range(options.steps):
                step(split)
    outcore.release(built.model)
    pipe.send(found)


def throttle(process: int, factor: float, over: threading.Event) -> None:
    """Let a process run for one part of time in ``factor``."""
    while not over.wait(SLICE):
        os.kill(process, signal.SIGSTOP)
        time.sleep(SLICE * (factor - 1))
        os.kill(process, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-tiny")
    parser.add_argument("--host-memory", default="6GiB")
    parser.add_argument("--sharding", default="none")
    parser.add_argument("--rows", type=int, default=320)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--throttle", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [context.Process(target=train, args=(r, options, folder, pipes[r][1])) for r in range(2)]
        for rank in ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()  # or a rank that ends early would be waited for
        over = threading.Event()
        slow = threading.Thread(target=throttle, args=(ranks[1].pid, options.throttle, over))
        slow.start()
        try:
            fast_found, slow_found = (pipe.recv() for pipe, _ in pipes)
        finally:
            over.set()
            slow.join()
            for rank in ranks:
                rank.join()
    speeds = [
        statistics.median(rows / busy for _, busy, rows in found["even"])
        for found in (fast_found, slow_found)
    ]
    ideal = options.rows / sum(speeds)
    result: dict[str, Any] = {"rows a second": speeds, "ideal": ideal, "options": vars(options)}
    print(f"speeds: {speeds[0]:.1f} and {speeds[1]:.1f} rows a second; the ideal step takes {ideal:.3f} s")
    for split in ("even", "speed"):
        seconds = statistics.median(s for s, _, _ in fast_found[split])
        parts = [found[split][-1][2] for found in (fast_found, slow_found)]
        result[split] = {"seconds": seconds, "rows": parts}
        print(
            f"{split:>5}: {parts[0]} + {parts[1]} rows, {seconds:.3f} s a step, {seconds / ideal:.2f} of the ideal"
        )
    if options.json:
        options.json.write_text(json.dumps(result, default=str, indent=1))


if __name__ == "__main__":
    main()
