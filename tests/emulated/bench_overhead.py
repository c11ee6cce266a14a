"""How much slower a training step is on the emulated accelerator than on the plain CPU.

    python tests/emulated/bench_overhead.py [--rounds 8]

A 4-layer GPT-2, forward, backward and AdamW. The variants take turns, so that a noisy machine hits all
alike; the figure is the median over rounds of each variant's time divided by the CPU's in the same round. Beside
wall time stands processor time, of all threads together, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulated import accelerator

VARIANTS = {
    "checker and poison": {"checker": True, "poison": True},
    "checker": {"checker": True, "poison": False},
    "poison": {"checker": False, "poison": True},
    "bare": {"checker": False, "poison": False},
}


class Seconds(NamedTuple):
    """Of one step: as the clock on the wall has them, and as the processors do."""

    wall: float
    processor: float


def training_step(device: str, embd: int, batch: int, tokens: int) -> Callable[[], Seconds]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=embd,
        n_head=embd // 64,
        vocab_size=8192,
        n_positions=tokens,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 8192, (batch, tokens))
    if device != "cpu":
        model = accelerator.to_device(model)
    ids = ids.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> Seconds:
        start, busy = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return Seconds(time.perf_counter() - start, time.process_time() - busy)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--embd", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    accelerator.configure()
    shape = (args.embd, args.batch, args.tokens)
    on_cpu = training_step("cpu", *shape)
    on_device = training_step(accelerator.NAME, *shape)
    for step in (on_cpu, on_device):
        step()
    ratios: dict[str, list[Seconds]] = {name: [] for name in VARIANTS}
    times = []
    for _ in range(args.rounds):
        for name, settings in VARIANTS.items():
            accelerator.configure(**settings)
            base, taken = on_cpu(), on_device()
            ratios[name].append(Seconds(taken.wall / base.wall, taken.processor / base.processor))
            times.append(base)
    walls, processors = zip(*times, strict=True)
    print(
        f"plain CPU: {statistics.median(walls):.3f} s a step, {statistics.median(processors):.3f} s of processors"
    )
    for name, found in ratios.items():
        wall, processor = (percent(list(values)) for values in zip(*found, strict=True))
        print(f"{name}: {wall}; processors {processor}")


def percent(ratios: list[float]) -> str:
    """Median overhead, and the range of the middle half."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"


if __name__ == "__main__":
    main()
