"""Host memory, and bytes read, of one process and of several ranks of one machine: while a model is loaded and used.

A model of blocks is written as a safetensors file in bf16. Ranks build it on ``meta``, call `outcore.offload` with
``weights=``, and use it for two forwards (and steps, where it is trained). Memory is the proportional set size (PSS) of
all ranks together, in which a page that several of them map counts once, less what they held before they loaded. It is
sampled all the time. Before that each rank loads and uses a tiny model, so that libraries and compiled kernels are
there, unless ``--cold``. Bytes from the disk are those that the system fetched for all ranks, after the file was
dropped from the page cache. ``--apart`` keeps ranks from sharing memory, as on different machines. ::

    python benchmarks/loading.py --directory /nvme [--blocks 32] [--rounds 3] [--json loading.json]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import outcore
from outcore.model import ranked_sites
from sides.report import machine, table, write_json

MiB = 1 << 20
PERIOD = 0.005
"""Seconds between samples."""

WAYS = (
    "train parameters",
    "train gradients",
    "train none",
    "infer parameters",
    "infer gradients",
    "infer none",
)


class Blocks(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def write_weights(blocks: int, width: int, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = Blocks(blocks, width)
    torch.manual_seed(0)
    state = {n: torch.randn(p.shape).mul_(width**-0.5).bfloat16() for n, p in model.named_parameters()}
    save_file(state, str(folder / "model.safetensors"))
    return folder / "model.safetensors"


# -- one rank ---------------------------------------------------------------------------------------


def rank(options: argparse.Namespace) -> None:
    """Load and use, each when told to, and say when it is done."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    if options.apart:
        ranked_sites.can_share = lambda world, willing: False  # type: ignore[assignment]
    way, sharding = options.way.split()
    if not options.cold:
        model, optimizer = offload(options, Blocks(1, 64), None, way, sharding)
        use(model, optimizer, 64)
        outcore.release(model)
    with torch.device("meta"):
        model = Blocks(options.blocks, options.width)
    wait(ready=True)
    before, start = fetched(), time.perf_counter()
    model, optimizer = offload(options, model, options.folder, way, sharding)
    seconds = time.perf_counter() - start
    wait(disk=fetched() - before, seconds=seconds)
    start = time.perf_counter()
    for _ in range(2):
        use(model, optimizer, options.width)
    wait(seconds=time.perf_counter() - start)
    outcore.release(model)


def offload(
    options: argparse.Namespace, model: nn.Module, weights: str | None, way: str, sharding: Any
) -> tuple[nn.Module, Any]:
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3) if way == "train" else None
    budget = outcore.Budget(host=options.host)
    states = outcore.Sharding(sharding)
    return outcore.offload(
        model, optimizer, device="cpu", weights=weights, budget=budget, sharding=states
    ), optimizer


def use(model: nn.Module, optimizer: Any, width: int) -> None:
    with torch.set_grad_enabled(optimizer is not None):
        out = model(torch.ones(1, width))
    if optimizer is not None:
        optimizer.backward(out.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def fetched() -> int:
    """Bytes that the system read from disks for this process."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"])


def wait(**word: Any) -> None:
    print(json.dumps(word), flush=True)
    sys.stdin.readline()


# -- all of them ------------------------------------------------------------------------------------


class Team:
    """Ranks of one run, and what they hold together."""

    def __init__(self, options: argparse.Namespace, folder: Path, way: str, ranks: int) -> None:
        command = [sys.executable, __file__, "--rank", "--folder", str(folder), "--way", way]
        command += ["--host", options.host, "--blocks", str(options.blocks), "--width", str(options.width)]
        command += ["--apart"] * options.apart + ["--cold"] * options.cold
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        common = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        self._members = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(common, WORLD_SIZE=str(ranks), RANK=str(number), LOCAL_RANK=str(number)),
            )
            for number in range(ranks)
        ]

    def words(self) -> list[dict[str, Any]]:
        """What all say next."""
        return [json.loads(member.stdout.readline()) for member in self._members]  # type: ignore[union-attr]

    def go_on(self) -> None:
        for member in self._members:
            assert member.stdin is not None
            member.stdin.write("\n")
            member.stdin.flush()

    def held(self) -> int:
        """PSS of all, in bytes."""
        total = 0
        for member in self._members:
            rollup = Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines()
            total += 1024 * sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        return total

    def watched(self) -> tuple[list[dict[str, Any]], int]:
        """Let them go on to their next words; those, and the most that was held meanwhile."""
        words: list[dict[str, Any]] = []
        listener = threading.Thread(target=lambda: words.extend(self.words()))
        most = 0
        self.go_on()
        listener.start()
        while listener.is_alive():
            most = max(most, self.held())
            time.sleep(PERIOD)
        return words, max(most, self.held())

    def end(self) -> None:
        for member in self._members:
            member.kill()
            member.wait()


def drop(file: Path) -> None:
    """From the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure(options: argparse.Namespace, file: Path, way: str, ranks: int) -> dict[str, Any]:
    team = Team(options, file.parent, way, ranks)
    try:
        team.words()
        drop(file)
        before = team.held()
        loaded, peak = team.watched()
        after = team.held()
        used, most = team.watched()
        found = {
            "before": before,
            "loading": peak - before,
            "loaded": after - before,
            "used": most - before,
            "disk": sum(word["disk"] for word in loaded),
            "seconds": max(word["seconds"] for word in loaded),
            "use seconds": max(word["seconds"] for word in used),
        }
        team.go_on()
        return found
    finally:
        team.end()


def summary(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> str:
    def median(key: str, what: str) -> float:
        return statistics.median(turn[what] for turn in found[key])

    rows = []
    for way in options.ways:
        for ranks in options.ranks:
            key, one = f"{way}, {ranks}", f"{way}, {options.ranks[0]}"
            row: Sequence[str] = [way, str(ranks)]
            for what in ("loading", "loaded", "used"):
                ratio = median(key, what) / median(one, what)
                row = [*row, " ".join(f"{turn[what] / MiB:.0f}" for turn in found[key]), f"{ratio:.2f}"]
            disk = " ".join(f"{turn['disk'] / MiB:.0f}" for turn in found[key])
            rows.append([*row, disk, " ".join(f"{turn['seconds']:.2f}" for turn in found[key])])
    head = ["way", "ranks", "peak while loading, MiB", "x", "loaded, MiB", "x", "peak in use, MiB", "x"]
    return table([*head, "from disk, MiB", "loading, s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--host", default="4GiB", help="budget of each rank")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", default=WAYS, help="train or infer, and what is sharded")
    parser.add_argument("--apart", action="store_true", help="ranks share no memory")
    parser.add_argument("--cold", action="store_true", help="count libraries and compiled kernels too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options)
        return
    file = write_weights(options.blocks, options.width, options.directory / "loading-weights")
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for _ in range(options.rounds):
            for way in options.ways:
                for ranks in options.ranks:
                    found.setdefault(f"{way}, {ranks}", []).append(measure(options, file, way, ranks))
        print(
            f"{file.stat().st_size / MiB:.0f} MiB of weights; all readings, ratios of medians to the first\n"
        )
        print(summary(options, found))
    finally:
        file.unlink()
        file.parent.rmdir()
    if options.json:
        write_json(
            options.json,
            {"machine": machine(), "options": vars(options) | {"directory": "", "json": ""}, "found": found},
        )


if __name__ == "__main__":
    main()
