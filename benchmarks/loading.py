"""Host memory and bytes read while a model is loaded, on one process and on several ranks of one machine.

A model of blocks is written as a safetensors file. Ranks build it on ``meta`` and call `outcore.offload` with
``weights=``. Memory is the proportional set size (PSS) of all ranks together, sampled while they load, less what they
held just before: a page that several of them map counts once. Bytes are what the system fetched from the disk for
them, after the file was dropped from the page cache, and what they asked for by system calls. ::

    python benchmarks/loading.py --directory /nvme --json loading.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import outcore

MiB = 1 << 20
PERIOD = 0.01
"""Seconds between samples."""


class Blocks(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def build(options: argparse.Namespace) -> Blocks:
    with torch.device("meta"):
        return Blocks(options.blocks, options.width)


def write_weights(options: argparse.Namespace, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: torch.randn(p.shape, dtype=torch.bfloat16) for name, p in build(options).named_parameters()}
    save_file(state, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


# -- one rank ---------------------------------------------------------------------------------------


def tell(**word: Any) -> None:
    print(json.dumps(word), flush=True)


def fetched() -> dict[str, int]:
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"disk": int(found["read_bytes"]), "calls": int(found["rchar"])}


def rank(options: argparse.Namespace) -> None:
    """Say when this rank is ready, wait for a word, load, say so, wait for the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
    offload(options, "warm", Blocks(1, 64), None) if options.warm else None
    model = build(options)
    tell(ready=True)
    sys.stdin.readline()
    before, start = fetched(), time.perf_counter()
    offload(options, "loaded", model, options.folder)
    seconds = time.perf_counter() - start
    tell(loaded=seconds, **{key: value - before[key] for key, value in fetched().items()})
    sys.stdin.readline()
    outcore.release(model)


def offload(options: argparse.Namespace, name: str, model: nn.Module, weights: str | None) -> None:
    trains = options.way == "train"
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3) if trains else None
    outcore.offload(
        model,
        optimizer,
        device="cpu",
        weights=weights,
        budget=outcore.Budget(host=options.host),
        sharding=outcore.Sharding(options.sharding),
    )
    if name == "warm":
        outcore.release(model)


# -- all of them ------------------------------------------------------------------------------------


def pss(processes: list[int]) -> dict[str, int]:
    """Bytes by kind, of all processes together."""
    total: dict[str, int] = {}
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]:
            key, value = line.split(":")
            if key.startswith("Pss") and key != "Pss_Dirty":
                total[key] = total.get(key, 0) + 1024 * int(value.split()[0])
    return total


def drop(file: Path) -> None:
    """From the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def load(options: argparse.Namespace, file: Path, way: str, sharding: str, ranks: int) -> dict[str, Any]:
    common = [sys.executable, __file__, "--rank", *(["--warm"] if options.warm else []), "--folder", str(file.parent), "--way", way]
    common += ["--sharding", sharding, "--host", options.host]
    common += ["--blocks", str(options.blocks), "--width", str(options.width)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    children = [
        subprocess.Popen(
            common,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, **shared, RANK=str(number), LOCAL_RANK=str(number)),
        )
        for number in range(ranks)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline())["ready"]
        drop(file)
        numbers = [child.pid for child in children]
        before = pss(numbers)
        for child in children:
            say(child)
        peak = dict.fromkeys(before, 0)
        words: list[dict[str, Any]] = []
        os.set_blocking(children[0].stdout.fileno(), True)
        import threading

        def listen() -> None:
            for child in children:
                words.append(json.loads(child.stdout.readline()))

        listener = threading.Thread(target=listen)
        listener.start()
        while listener.is_alive():
            now = pss(numbers)
            if now["Pss"] > peak["Pss"]:
                peak = now
            time.sleep(PERIOD)
        after = pss(numbers)
        for child in children:
            say(child)
        for child in children:
            child.wait(60)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {
        "before": before,
        "peak": {key: peak[key] - before[key] for key in before},
        "held": {key: after[key] - before[key] for key in before},
        "disk": sum(word["disk"] for word in words),
        "calls": sum(word["calls"] for word in words),
        "seconds": max(word["loaded"] for word in words),
    }


def say(child: Any) -> None:
    child.stdin.write("on\n")
    child.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--host", default="4GiB")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", default=["train parameters"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--sharding", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    file = write_weights(options, options.directory / "weights")
    print(f"file {file.stat().st_size / MiB:.1f} MiB")
    for way in options.ways:
        for _ in range(options.rounds):
            for ranks in options.ranks:
                found = load(options, file, *way.split(), ranks)
                print(way, ranks, {k: f"{v / MiB:.1f}" for k, v in found["peak"].items()},
                      "held", f"{found['held']['Pss'] / MiB:.1f}", "before", f"{found['before']['Pss'] / MiB:.1f}",
                      "disk", f"{found['disk'] / MiB:.1f}", "calls", f"{found['calls'] / MiB:.1f}", f"{found['seconds']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
