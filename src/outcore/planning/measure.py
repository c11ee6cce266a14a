"""What ``outcore profile`` measures: how fast each part of this machine is at what a step asks of it.

Each figure is a mean over half a second or more: a run, too, gets what others leave it on average, not at best.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.chunks.layout import ALIGN
from outcore.optim.kernels import AdamRule, GradTransform, Master
from outcore.planning.disk_speed import Disk, passing
from outcore.planning.flow import Traffic
from outcore.planning.machine import Machine
from outcore.planning.replay import HOST
from outcore.planning.stopwatch import mean, product, together
from outcore.planning.this import sizes
from outcore.planning.work import Work

COUNT = 1 << 21
"""Parameters of an update beside which computing is measured: those of a chunk or two."""
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
    share = attention(device, flops.get("bf16") or flops["fp32"])
    host_bandwidth = copying()
    link_in, link_out = (0.0, 0.0) if on_host else links(device)
    say("the update kernel")
    update, update_turn = updating()
    say("operators")
    overhead = launching(device)
    say("computing beside an update")
    both = sum(together(product(device), update_of(COUNT)[0]))
    traffic = Traffic(0.0, 0.0)
    if folder is not None:
        say(f"the disk at {os.fspath(folder)}")
        with Disk(folder) as probe:
            read, write = probe.rates()
        traffic = passing(folder, read, write, device)
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
        disk_read=traffic.read,
        disk_write=traffic.write,
        update=update,
        update_turn=update_turn,
        overhead=overhead,
        both=min(2.0, max(1.0, both)),
        slowed=traffic.slowed,
        turn=traffic.turn,
        io_turn=traffic.io_turn,
        io_rate=traffic.io_rate,
        use=traffic.use,
        attention=min(4.0, share),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


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
    """Bytes per second, read and written, of what a block does beside matrix products: norms, gates, sums.

    On tensors of the size that a layer has: on a CPU larger ones measure the heap, which gives them back each time.
    """
    rows = 2048 if device.type == "cpu" else 32768
    norm = nn.LayerNorm(1024).to(device, torch.bfloat16)
    x = torch.randn(rows, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)

    def work() -> None:
        y = norm(x)
        gate = 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.04 * y.pow(3.0))))
        (x + gate).sum().backward()

    counter = _Counter()
    with counter:
        work()
    return counter.work.nbytes / mean(work, device)


def attention(device: torch.device, rate: float) -> float:
    """FLOP/s of fused attention, forward and backward, as a share of ``rate``."""
    q, k, v = (
        torch.randn(2, 8, 512, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def work() -> None:
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    counter = _Counter()
    with counter:
        work()
    return sum(counter.work.flops.values()) / mean(work, device) / rate


def copying() -> float:
    """Bytes per second, read and written, of a copy in DRAM."""
    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    return 2 * source.nbytes / mean(lambda: target.copy_(source), HOST)


def links(device: torch.device) -> tuple[float, float]:
    """Bytes per second from page-locked host memory to the device, and back."""
    try:
        host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        host = torch.empty(256 << 20, dtype=torch.uint8)
    there = torch.empty_like(host, device=device)
    up = mean(lambda: there.copy_(host, non_blocking=True), device)
    down = mean(lambda: host.copy_(there, non_blocking=True), device)
    return host.nbytes / up, host.nbytes / down


def updating() -> tuple[float, float]:
    """Bytes per second, read and written, of AdamW with split masters, and the seconds of one of next to none."""
    work, nbytes = update_of(1 << 24)
    return nbytes / mean(work, HOST), mean(update_of(ALIGN)[0], HOST)


def update_of(count: int) -> tuple[Callable[[], object], int]:
    """An update of so many parameters, and the bytes it reads and writes."""
    rule = AdamRule(decoupled=True)
    parameter = torch.randn(count).to(torch.bfloat16)
    gradient = torch.randn(count).to(torch.bfloat16)
    planes = tuple(torch.zeros(count, dtype=p.dtype) for p in rule.planes(torch.bfloat16, Master.SPLIT))
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

    def work() -> None:
        rule.update(parameter, gradient, planes, hyper, 1, GradTransform())

    written = parameter.nbytes + sum(plane.nbytes for plane in planes)
    return work, gradient.nbytes + 2 * written


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
