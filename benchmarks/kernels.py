"""How fast one AdamW step on the host is: ours against torch and DeepSpeed.

Every contender takes bf16 gradients and leaves bf16 parameters, with an fp32 master and fp32 moments.
Contenders take turns, so that a disturbance hits all of them; medians are compared. ::

    python benchmarks/kernels.py --elements 64Mi --rounds 9 --json kernels.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from outcore.optim.kernels import AdamRule, GradTransform, Master, Workers

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        bytes_per_element: what one step must read and write at least; 0 if it is not counted.
    """

    name: str
    step: Callable[[], object]
    bytes_per_element: int


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; ``of_copy`` is the share of the measured copy bandwidth."""

    name: str
    milliseconds: float
    best_milliseconds: float
    bytes_per_second: float
    of_copy: float
    times_torch: float


def copy(n: int, threads: int) -> Contender:
    """A plain copy of as many bytes as an fp32 plane has, split as the kernels are."""
    source, target = torch.ones(n).numpy(), torch.empty(n).numpy()
    workers = Workers(threads)

    def piece(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    return Contender("copy", lambda: workers.run(piece, n), 8)


def ours(n: int, master: Master, threads: int) -> Contender:
    rule, workers = AdamRule(), Workers(threads)
    planes = tuple(torch.zeros(n, dtype=plane.dtype) for plane in rule.planes(torch.bfloat16, master))
    param, grad = torch.empty(n, dtype=torch.bfloat16), gradient(n)
    rule.initialise(planes, param, torch.randn(n))
    hyper = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}

    def step() -> None:
        rule.update(param, grad, planes, hyper, 10, GradTransform(), workers)

    # gradient in; master and moments in and out; parameter out, which a split master has in it already
    moved = 2 + 2 * (4 + 8) + (2 if master is Master.FULL else 0)
    return Contender(f"outcore {master.value}", step, moved)


def torch_fused(n: int) -> Contender:
    """Torch's fused AdamW and the two casts around it."""
    weight = torch.nn.Parameter(torch.randn(n))
    weight.grad = torch.empty(n)
    wide, param, grad = weight.grad, torch.empty(n, dtype=torch.bfloat16), gradient(n)
    optimizer = torch.optim.AdamW([weight], LR, BETAS, EPS, DECAY, fused=True)

    def step() -> None:
        wide.copy_(grad)
        optimizer.step()
        param.copy_(weight.detach())

    return Contender("torch fused, two casts", step, 0)


def deepspeed(n: int) -> Contender | None:
    """DeepSpeed's CPU Adam and the two casts around it, if it is installed and builds."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    weight = torch.nn.Parameter(torch.randn(n))
    weight.grad = torch.empty(n)
    wide, param, grad = weight.grad, torch.empty(n, dtype=torch.bfloat16), gradient(n)
    optimizer = DeepSpeedCPUAdam([weight], LR, betas=BETAS, eps=EPS, weight_decay=DECAY)

    def step() -> None:
        wide.copy_(grad)
        optimizer.step()
        param.copy_(weight.detach())

    return Contender("deepspeed, two casts", step, 0)


def gradient(n: int) -> torch.Tensor:
    return torch.randn(n).to(torch.bfloat16)


def measure(contenders: list[Contender], n: int, rounds: int) -> list[Result]:
    """Time every contender once a round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds + 1):
        for contender in contenders:
            start = time.perf_counter()
            contender.step()
            seconds[contender.name].append(time.perf_counter() - start)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    rates = {c.name: c.bytes_per_element * n / median[c.name] for c in contenders}
    reference = median["torch fused, two casts"]
    return [
        Result(
            c.name,
            median[c.name] * 1e3,
            min(seconds[c.name][1:]) * 1e3,
            rates[c.name],
            rates[c.name] / rates["copy"],
            reference / median[c.name],
        )
        for c in contenders
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--elements", default="64Mi", help="parameters, e.g. 64Mi")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    text = options.elements
    n = int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    contenders = [
        copy(n, options.threads),
        ours(n, Master.FULL, options.threads),
        ours(n, Master.SPLIT, options.threads),
        torch_fused(n),
    ]
    if (rival := deepspeed(n)) is not None:
        contenders.append(rival)
    results = measure(contenders, n, options.rounds)
    print(f"{n:,} parameters, {options.threads} threads, medians of {options.rounds} rounds")
    for r in results:
        rate = f"{r.bytes_per_second / 1e9:6.1f} GB/s, {r.of_copy:4.0%} of copy" if r.bytes_per_second else ""
        print(
            f"{r.name:24} {r.milliseconds:8.1f} ms (best {r.best_milliseconds:6.1f})  "
            f"{r.times_torch:5.2f} x torch  {rate}"
        )
    if options.json:
        report = {
            "elements": n,
            "threads": options.threads,
            "rounds": options.rounds,
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "results": [asdict(result) for result in results],
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
