"""What saving costs: how long it keeps the loop, and what a run that saves every so many steps loses.

    python benchmarks/saving.py [--model gpt2] [--rounds 5] [--json FILE]
    python benchmarks/saving.py --every 10 [--waited] [--host-memory 1GiB] ...

The first form times, in turns, a save that is waited for (after a step whose updates are done) and the blocking part of
one that is not (right after a step). The second takes rounds of steps in turns, with a save at the beginning or
without, and compares their times; waiting at the end of a round for what is left of the save is part of its time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore.integrations.transformers import build
from outcore.offloaded import engine_of


class Run:
    """A language model in training on random tokens, in a folder that holds what it saves."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        torch.manual_seed(0)
        built = build(options.model, training=True)
        self.model: Any = built.model
        self.optimizer = outcore.AdamW(self.model.parameters(), lr=1e-4)
        budget = outcore.Budget(host=options.host_memory, disk=folder if options.disk else None)
        activations = outcore.Activations("recompute")
        outcore.offload(self.model, self.optimizer, budget=budget, activations=activations)
        self._folder = folder
        self._ids = torch.randint(0, built.vocabulary, (options.batch_size, options.seq_len))
        self._saves = 0

    def step(self) -> None:
        loss = self.model(input_ids=self._ids, labels=self._ids).loss
        self.optimizer.backward(loss)
        self.optimizer.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, wait: bool) -> outcore.Saving:
        """Save in place of the save before."""
        self.remove()
        self._saves += 1
        return outcore.save(self._place, self.model, self.optimizer, wait=wait)

    def remove(self) -> None:
        if self._place.exists():
            shutil.rmtree(self._place)

    @property
    def _place(self) -> Path:
        return self._folder / f"saved-{self._saves}"

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self._place.iterdir())


def timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def blocking(run: Run, rounds: int) -> dict[str, Any]:
    """Medians of a save's time, waited for and not, in turns."""
    found: dict[str, list[float]] = {"waited for": [], "beside": [], "until committed": []}
    for _ in range(rounds):
        run.step()
        engine_of(run.model).settle()
        found["waited for"].append(timed(lambda: run.save(True)))
        run.step()
        run.remove()
        saves: list[outcore.Saving] = []
        begun = time.perf_counter()
        found["beside"].append(timed(lambda saves=saves: saves.append(run.save(False))))  # type: ignore[misc]
        run.step()
        saves[0].wait()
        found["until committed"].append(time.perf_counter() - begun)
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {
        "bytes": run.nbytes,
        "seconds": medians,
        "all": found,
        "share": medians["beside"] / medians["waited for"],
    }


def overhead(run: Run, rounds: int, every: int, wait: bool) -> dict[str, Any]:
    """What a save after each ``every`` steps adds, from rounds of steps in turns: wall clock and the process's CPU."""
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}

    def steps() -> None:
        for _ in range(every):
            run.step()

    def with_save() -> None:
        saving = run.save(wait)
        steps()
        saving.wait()

    for _ in range(rounds):
        for name, act in (("without", steps), ("with", with_save)):
            engine_of(run.model).settle()
            run.remove()
            cpu = time.process_time()
            found[name].append((timed(act), time.process_time() - cpu))
            print(name, *(f"{seconds:.2f}" for seconds in found[name][-1]), file=sys.stderr, flush=True)
    medians = {
        name: [statistics.median(times) for times in zip(*all_, strict=True)] for name, all_ in found.items()
    }
    return {
        "seconds": medians,
        "all": found,
        "overhead": [w / wo - 1 for w, wo in zip(medians["with"], medians["without"], strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument(
        "--waited", action="store_true", help="measure the overhead of saves that are waited for"
    )
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--disk", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Run(options, Path(folder))
        for _ in range(2):  # the first is measured, the second is foreseen for the first time
            run.step()
        if options.every:
            result = overhead(run, options.rounds, options.every, options.waited)
        else:
            result = blocking(run, options.rounds)
        outcore.release(run.model)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
