"""What ``outcore profile`` measures: how fast each part of this machine is at what a step asks of it.

Each figure is a mean over half a second or more: a run, too, gets what others leave it on average, not at best.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.memory.budget import DiskLimit
from outcore.memory.disk import DiskTier
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger
from outcore.optim.kernels import AdamRule, GradTransform, Master
from outcore.planning.machine import Machine
from outcore.planning.this import sizes
from outcore.planning.work import Work

ROUNDS = 3
SPAN = 0.6
"""Least rounds and seconds of a measurement."""
DISK_SAMPLE = 512 << 20
EXTENT = 32 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Say = Callable[[str], None]


def measure(
    device: torch.device, folder: str | os.PathLike[str] | None, say: Say = lambda text: None
) -> Machine:
    """Measure this machine.

    Args:
        device: what computes.
        folder: a directory on the disk to be measured; half a GiB is written there for a moment. None: no disk.
        say: told what is being measured.

    Raises:
        TierError: the disk can't be used.
    """
    on_host = device.type == "cpu"
    say("matrix products")
    flops = {name: rate for name, dtype in DTYPES.items() if (rate := products(dtype, device))}
    say("memory")
    compute_bandwidth = elementwise(device)
    host_bandwidth = copying()
    link_in, link_out = (0.0, 0.0) if on_host else links(device)
    say("the update kernel")
    update = updating()
    say("operators")
    overhead = launching(device)
    read, write = 0.0, 0.0
    if folder is not None:
        say(f"the disk at {os.fspath(folder)}")
        read, write = disk(folder)
    on_device, host, room = sizes(device, folder)
    return Machine(
        name=f"{os.uname().nodename}, {device}",
        device=on_device,
        host=host,
        disk=room,
        flops=flops,
        reached=1.0,
        compute_bandwidth=compute_bandwidth,
        host_bandwidth=host_bandwidth,
        link_in=link_in,
        link_out=link_out,
        disk_read=read,
        disk_write=write,
        update=update,
        overhead=overhead,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def mean(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that some work takes on average over `SPAN`, after it was done once."""
    work()
    _finish(device)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SPAN or count < ROUNDS:
        work()
        _finish(device)
        count += 1
    return elapsed / count


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def products(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of a matrix product that is large enough; 0 where there is none in this dtype."""
    rate = 0.0
    size = 256
    while size <= 8192:
        try:
            a = torch.randn(size, size, device=device).to(dtype)
            seconds = mean(lambda a=a: a @ a, device)  # type: ignore[misc]
        except RuntimeError:
            return rate
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > 0.15:
            break
        size *= 2
    return rate


def elementwise(device: torch.device) -> float:
    """Bytes per second, read and written, of bf16 operators beside matrix products."""
    x = torch.randn(1 << 24, device=device).to(torch.bfloat16)
    return 3 * x.nbytes / mean(lambda: x + x, device)  # two arguments and a result, as a plan counts them


def copying() -> float:
    """Bytes per second, read and written, of a copy in DRAM."""
    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    return 2 * source.nbytes / mean(lambda: target.copy_(source), torch.device("cpu"))


def links(device: torch.device) -> tuple[float, float]:
    """Bytes per second from page-locked host memory to the device, and back."""
    try:
        host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        host = torch.empty(256 << 20, dtype=torch.uint8)
    there = torch.empty_like(host, device=device)
    down = mean(lambda: there.copy_(host, non_blocking=True), device)
    return host.nbytes / down, host.nbytes / mean(lambda: host.copy_(there, non_blocking=True), device)


def updating() -> float:
    """Bytes per second, read and written, of AdamW with split masters."""
    count = 1 << 24
    rule = AdamRule(decoupled=True)
    parameter = torch.randn(count).to(torch.bfloat16)
    gradient = torch.randn(count).to(torch.bfloat16)
    planes = tuple(torch.zeros(count, dtype=p.dtype) for p in rule.planes(torch.bfloat16, Master.SPLIT))
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def work() -> None:
        rule.update(parameter, gradient, planes, hyper, 1, GradTransform())

    written = parameter.nbytes + sum(plane.nbytes for plane in planes)
    return (gradient.nbytes + 2 * written) / mean(work, torch.device("cpu"))


def launching(device: torch.device) -> float:
    """Seconds per operator of small layers, forward and backward: what Python and dispatch take."""
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(8, 64, device=device)
    counter = _Counter()
    with counter:
        model(x).sum().backward()
    return mean(lambda: model(x).sum().backward(), device) / counter.work.operators


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work.none()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.work.note(func, args, kwargs or {}, result)
        return result


def disk(folder: str | os.PathLike[str]) -> tuple[float, float]:
    """Bytes per second read from and written to a private file there, through the tier that runs use.

    Raises:
        TierError: the disk can't be used.
    """
    count = DISK_SAMPLE // EXTENT
    regions = [reserve(EXTENT) for _ in range(min(4, count))]
    for region in regions:
        region.tensor.random_(0, 256)
    limit = DiskLimit(os.path.abspath(os.fspath(folder)), DISK_SAMPLE)
    with DiskTier.open([limit], ledger=Ledger()) as tier:
        extents = [tier.allocate(EXTENT) for _ in range(count)]

        def write() -> None:
            for future in [tier.write(e, regions[k % len(regions)].buffer) for k, e in enumerate(extents)]:
                future.result()

        def read() -> None:
            for first in range(0, count, len(regions)):
                group = extents[first : first + len(regions)]
                for future in [tier.read(e, r.buffer) for e, r in zip(group, regions, strict=False)]:
                    future.result()

        wrote = mean(write, torch.device("cpu"))
        return DISK_SAMPLE / mean(read, torch.device("cpu")), DISK_SAMPLE / wrote
