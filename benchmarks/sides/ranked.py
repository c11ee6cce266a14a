"""One rank at rest and in a step, in this process: ``python -m sides.ranked '{...}'``; the last line is its result.

Memory is what the process's pages come to (PSS: what it shares counts in part), between steps and after the C library
gave back what it had free, less the same of a model of a few thousand parameters that was trained before. Bytes are
what the kernel counted on this process's TCP sockets (``TCP_INFO``), whoever opened them.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import outcore
from outcore.memory import heap
from outcore.model import ranked_sites
from outcore.offloaded import engine_of
from sides.models import MODELS, batch
from sides.turn import MARK

SMALL = "gpt2-tiny"
"""What is trained first, so that code, libraries and buffers that any model needs are there."""

RECEIVED = 128
"""Where ``struct tcp_info`` has the payload bytes that came in; 8 bytes before, those that went out and arrived."""


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    outcore.widen_matmuls()  # for all alike
    if asked.get("ranks", 1) > 1:
        dist.init_process_group("gloo")
    train(asked, SMALL, 1)
    baseline = pss()
    print(
        MARK + json.dumps({"baseline": baseline, **train(asked, asked["model"], asked["steps"])}), flush=True
    )


def train(asked: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    """Steps of one model, and what it held and received."""
    model: Any = MODELS[name].build()
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = outcore.AdamW(model.parameters(), lr=1e-4)
    with apart(asked["apart"]):
        outcore.offload(
            model,
            optimizer,
            device="cpu",
            budget=outcore.Budget(host=asked["budget"]),
            precision=outcore.Precision(asked["precision"]),
            activations=outcore.Activations("recompute"),
            sharding=outcore.Sharding(asked["states"]),
        )
    own = int(os.environ.get("RANK", "0"))
    wire: list[int] = []
    device: list[int] = []
    counted: list[int] = []
    for number in range(1 + steps):
        ids = batch(name, asked.get("ranks", 1), asked["tokens"], number)[own : own + 1]
        barrier(asked)
        before = received(), on_device(), outcore.snapshot(model).moved.get("wire", 0)
        barrier(asked)
        optimizer.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).settle()
        barrier(asked)
        if number:  # the first measures activations
            wire.append(received() - before[0])
            device.append(on_device() - before[1])
            counted.append(outcore.snapshot(model).moved.get("wire", 0) - before[2])
    pool = engine_of(model).pool
    pool.hold_idle(False)  # pages that hold nothing and wait for the next step are given back
    pool.hold_idle(True)
    found = {
        "parameters": count,
        "pss": pss(),
        "ledger": outcore.snapshot(model).held["host"],
        "wire": wire,
        "device": device,
        "counted": counted,
    }
    outcore.release(model)
    return found


@contextmanager
def apart(on: bool) -> Iterator[None]:
    """Ranks that are offloaded within share no memory, as on different machines, if ``on``."""
    can_share = ranked_sites.can_share
    with mock.patch.object(
        ranked_sites, "can_share", lambda world, willing: can_share(world, willing and not on)
    ):
        yield


def barrier(asked: dict[str, Any]) -> None:
    if asked.get("ranks", 1) > 1:
        dist.barrier()


def pss() -> int:
    """Bytes of this process's pages, shared ones divided among those who share them."""
    heap.give_back()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def received() -> int:
    """Payload bytes that came in over all TCP connections of this process so far."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            with closing(socket.socket(fileno=os.dup(int(entry)))) as found:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # it is gone, or no TCP
            continue
        if len(info) >= RECEIVED + 8:
            total += struct.unpack_from("<Q", info, RECEIVED)[0]
    return total


def on_device() -> int:
    """Bytes, headers and all, that the loopback device of this network namespace received."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    return 0


if __name__ == "__main__":
    main()
