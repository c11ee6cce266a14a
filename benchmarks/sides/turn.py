"""One turn of one contender, in this process: ``python -m sides.turn '{...}'``; the last line is its result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import outcore

MARK = "turn: "


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(asked.pop("threads"))
    if not asked.pop("own_products", False):
        outcore.widen_matmuls()  # for all alike: what is compared is where states are, not who multiplies
    device = asked["device"]
    idea = asked.pop("without", None)
    if idea is not None:
        from sides.without import do_without

        do_without(idea)
    if device == "emu":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
        from emulated import accelerator

        accelerator.configure(checker=False, poison=False, **asked.pop("emulator"))
    asked.pop("emulator", None)
    result = generate(asked) if "new_tokens" in asked else train(asked)
    peak = peak_since()  # ``ru_maxrss`` would start with what the parent held when it forked
    on_device = 0 if device == "cpu" else torch.accelerator.max_memory_allocated()
    print(MARK + json.dumps({**result, "peak_rss": peak, "peak_device": on_device}), flush=True)


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Steps that are not counted, then those that are.

    ``processor`` is the time that all threads of the process were running: on a machine with other work it says
    what a step costs, though not how long it takes.
    """
    from sides.training import Settings, trainer

    warm, steps = asked.pop("warm"), asked.pop("steps")
    settings = Settings(**asked)
    at_work = trainer(settings)
    seconds, processor, update, loss = [], [], [], 0.0
    before: dict[str, int] = {}
    held = getattr(at_work, "held", dict)
    for number in range(warm + steps):
        ids = settings.batch(number)
        if number == warm:
            before = at_work.moved()
            held()
            forget_peak()
        start, busy = time.perf_counter(), time.process_time()
        loss = at_work.step(ids)
        if number >= warm:
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - busy)
            update.append(at_work.update)
    moved = {link: (nbytes - before[link]) / steps for link, nbytes in at_work.moved().items()}
    times = {"seconds": seconds, "processor": processor, "update": update}
    return {**times, "loss": loss, "moved": moved, "peak_steps": peak_since(), "most_held": held()}


def forget_peak() -> None:
    """From here on `peak_since` counts; the making of a model is another peak than its training."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_since() -> int:
    """The most resident bytes since `forget_peak`, or since the process began."""
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(line.split()[1]) * 1024


def generate(asked: dict[str, Any]) -> dict[str, Any]:
    from sides.generation import generate as run

    return run(**asked)


if __name__ == "__main__":
    main()
