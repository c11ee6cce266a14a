"""How much slower a training step is on the emulated accelerator than on the plain CPU.

    python tests/emulated/bench_overhead.py [--rounds 8]

A 4-layer GPT-2, forward, backward and AdamW. The variants take turns, so that a noisy machine hits all
alike; the figure is the median over rounds of each variant's time divided by the CPU's in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulated import accelerator

VARIANTS = {
    "checker and poison": {"checker": True, "poison": True},
    "checker": {"checker": True, "poison": False},
    "poison": {"checker": False, "poison": True},
    "bare": {"checker": False, "poison": False},
}


def training_step(device: str, embd: int, batch: int, tokens: int) -> Callable[[], float]:
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

    def step() -> float:
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start

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
    ratios: dict[str, list[float]] = {name: [] for name in VARIANTS}
    times = []
    for _ in range(args.rounds):
        for name, settings in VARIANTS.items():
            accelerator.configure(**settings)
            base = on_cpu()
            ratios[name].append(on_device() / base)
            times.append(base)
    print(f"plain CPU: {statistics.median(times) * 1e3:.0f} ms a step")
    for name, values in ratios.items():
        print(f"{name}: {(statistics.median(values) - 1) * 100:+.1f} %")


if __name__ == "__main__":
    main()
