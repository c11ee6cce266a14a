"""How fast the disk tier is: against fio where that is installed, with and without its checksums.

Everybody moves the same bytes in the same directory past the page cache, in requests of the same size.
Contenders take turns, so that a disturbance hits all of them; medians are compared. "Fresh"
reads go into memory that was given back before, as they do in training: the system then has to find and
clear pages as well. ::

    python benchmarks/disk.py --directory /nvme --size 1GiB --rounds 7 --json disk.json
    python benchmarks/disk.py --directory /nvme --sweep          # requests of 1 to 16 MiB, 1 to 8 threads
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from outcore.memory.disk import DiskTier
from outcore.memory.host import Region, reserve
from outcore.memory.ledger import Ledger
from outcore.memory.sizes import format_size, parse_size

MB = 1e6
Measure = Callable[[], float]
"""Moves all bytes once; the seconds it took."""


class Tier:
    """A tier whose extents and buffers hold ``size`` bytes."""

    def __init__(self, tier: DiskTier, regions: list[Region]) -> None:
        self._tier = tier
        self._regions = regions
        self._extents = [tier.allocate(region.nbytes) for region in regions]
        self.write()  # the first write of a place is slower everywhere

    def write(self) -> float:
        return self._all(self._tier.write)

    def read(self) -> float:
        return self._all(self._tier.read)

    def read_fresh(self) -> float:
        for region in self._regions:
            region.release()
        return self._all(self._tier.read)

    def _all(self, move: Callable[..., Future[None]]) -> float:
        start = time.perf_counter()
        for future in [move(e, r.buffer) for e, r in zip(self._extents, self._regions, strict=True)]:
            future.result()
        return time.perf_counter() - start


class Fio:
    """The same with fio, asynchronous; its buffers in huge pages, as the tier's are, or not."""

    def __init__(self, directory: Path, size: int, request: int, depth: int, engine: str, huge: bool) -> None:
        self._command = [
            *("fio", "--name=x", f"--filename={directory / 'fio'}", f"--size={size}", f"--bs={request}"),
            *(f"--iodepth={depth}", f"--ioengine={engine}", "--direct=1", "--thread", "--output-format=json"),
            *("--fallocate=posix", "--overwrite=1", "--end_fsync=0", "--invalidate=0"),
        ]
        self._env = dict(os.environ)
        if huge:
            self._env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        self.write()

    def write(self) -> float:
        return self._run("write")

    def read(self) -> float:
        return self._run("read")

    def _run(self, direction: str) -> float:
        done = subprocess.run(
            [*self._command, f"--rw={direction}"], capture_output=True, text=True, check=True, env=self._env
        )
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        return float(found["io_bytes"] / found["bw_bytes"])


def measure(contenders: dict[str, Measure], size: int, rounds: int) -> dict[str, list[float]]:
    """MB/s of each contender in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = list(contenders)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            speeds[name].append(size / MB / contenders[name]())
    return speeds


def open_tier(directory: Path, args: argparse.Namespace, checksum: bool = True) -> DiskTier:
    return DiskTier(
        [directory],
        ledger=Ledger(),
        budget=args.size,
        threads=args.threads,
        request_bytes=args.request,
        queue_bytes=args.size,
        checksum=checksum,
    )


def compare(args: argparse.Namespace, directory: Path, regions: list[Region]) -> dict[str, list[float]]:
    with ExitStack() as stack:
        checked = Tier(stack.enter_context(open_tier(directory, args)), regions)
        plain = Tier(stack.enter_context(open_tier(directory, args, checksum=False)), regions)
        contenders: dict[str, Measure] = {
            "read": checked.read,
            "read, unchecked": plain.read,
            "read, fresh pages": checked.read_fresh,
            "write": checked.write,
            "write, unchecked": plain.write,
        }
        if args.fio and shutil.which("fio"):
            for depth, huge in ((args.threads, False), (args.threads, True), (args.fio_depth, True)):
                fio = Fio(directory, args.size, args.request, depth, args.fio_engine, huge)
                label = f"fio depth {depth}{' huge' if huge else ''}"
                contenders[f"read, {label}"] = fio.read
                contenders[f"write, {label}"] = fio.write
        return measure(contenders, args.size, args.rounds)


def sweep(args: argparse.Namespace, directory: Path, regions: list[Region]) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for args.request in (1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20):
        for args.threads in (1, 2, 4, 8):
            with open_tier(directory, args) as opened:
                tier = Tier(opened, regions)
                label = f"{format_size(args.request)}, {args.threads} threads"
                both: dict[str, Measure] = {f"read, {label}": tier.read_fresh, f"write, {label}": tier.write}
                speeds.update(measure(both, args.size, args.rounds))
    return speeds


def report(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    rows = {}
    for name in sorted(speeds):
        row = {"median": statistics.median(speeds[name]), "min": min(speeds[name]), "max": max(speeds[name])}
        base = speeds.get(name.partition(",")[0])
        if base and base is not speeds[name]:
            row["tier/this"] = statistics.median(a / b for a, b in zip(base, speeds[name], strict=True))
        rows[name] = row
        ratio = f"   the tier is {row['tier/this']:.2f} of this" if "tier/this" in row else ""
        print(f"{name:32} {row['median']:8.0f} MB/s  ({row['min']:.0f} to {row['max']:.0f}){ratio}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--size", type=parse_size, default="1GiB")
    parser.add_argument("--extent", type=parse_size, default="64MiB")
    parser.add_argument("--request", type=parse_size, default="4MiB")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--no-fio", dest="fio", action="store_false")
    parser.add_argument("--fio-depth", type=int, default=16)
    parser.add_argument("--fio-engine", default="libaio")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    regions = [reserve(args.extent) for _ in range(args.size // args.extent)]
    args.size = args.extent * len(regions)
    for region in regions:
        region.tensor.random_(0, 256)
    with TemporaryDirectory(dir=args.directory) as directory:
        rows = report((sweep if args.sweep else compare)(args, Path(directory), regions))
    if args.json:
        machine = {"platform": platform.platform(), "cores": os.cpu_count()}
        settings = {
            k: str(v) if isinstance(v, Path) else v
            for k, v in vars(args).items()
            if k not in ("json", "directory")
        }
        args.json.write_text(json.dumps({"machine": machine, "settings": settings, "MB/s": rows}, indent=1))


if __name__ == "__main__":
    main()
