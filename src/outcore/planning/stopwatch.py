"""How long work takes, alone and beside other work: what the measurements of a profile have in common.

Each figure is a mean over half a second or more: a run, too, gets what others leave it on average, not at best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from outcore.memory.device import finish

ROUNDS = 3
SPAN = 0.6
"""Least rounds and seconds of a measurement."""

Work = Callable[[], object]


def mean(work: Work, device: torch.device) -> float:
    """Seconds that some work takes on average over `SPAN`, after it was done once."""
    work()
    finish(device)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SPAN or count < ROUNDS:
        work()
        finish(device)
        count += 1
    return elapsed / count


def together(first: Work, second: Work) -> tuple[float, float]:
    """The speeds of two kinds of work at the same time, each as a share of its speed alone.

    Alone and together take turns, so that a machine that others use too changes both alike.
    """
    alone, beside = [0.0, 0.0], [0.0, 0.0]
    for _ in range(ROUNDS):
        alone[0] += speed(first, SPAN / 3)
        alone[1] += speed(second, SPAN / 3)
        with ThreadPoolExecutor(1) as other:
            future = other.submit(speed, second, SPAN / 2)
            beside[0] += speed(first, SPAN / 2)
            beside[1] += future.result()
    return beside[0] / alone[0], beside[1] / alone[1]


def speed(work: Work, seconds: float) -> float:
    """How often some work is done per second."""
    start = time.perf_counter()
    count = counted(work, seconds)
    return count / (time.perf_counter() - start)


def counted(work: Work, seconds: float) -> int:
    """Do some work again and again for so long, once at least. Returns how often."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or count == 0:
        work()
        count += 1
    return count


def each(work: Work, seconds: float) -> float:
    """Seconds that some work takes on average, for so long."""
    return 1 / speed(work, seconds)


def product(device: torch.device) -> Work:
    """A matrix product of the size that a layer has."""
    a, b = (torch.randn(1024, 1024, device=device).to(torch.bfloat16) for _ in range(2))

    def work() -> None:
        torch.mm(a, b)
        finish(device)

    return work


def layer(device: torch.device, rows: int) -> Work:
    """A small layer as Python calls it: a few operators, views in between."""
    width = 512
    layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
    layers = layers.to(device, torch.bfloat16)
    x = torch.randn(rows, width, device=device).to(torch.bfloat16)

    def work() -> None:
        with torch.no_grad():
            layers(x.view(-1, width)).view(rows, width)
        finish(device)

    return work
