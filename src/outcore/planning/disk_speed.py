"""What ``outcore profile`` measures of a disk: how fast it is, and what it and computing cost each other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial

import torch

from outcore.memory import cores
from outcore.memory.disk import DiskTier
from outcore.memory.host import reserve
from outcore.memory.ledger import Ledger
from outcore.memory.limits import DiskLimit
from outcore.planning.flow import Traffic
from outcore.planning.passage import Passage
from outcore.planning.replay import HOST
from outcore.planning.stopwatch import ROUNDS, SPAN, Work, counted, each, layer, mean

DISK_SAMPLE = 512 << 20
EXTENT = 32 << 20
PASSING = {1 << 20: 48, 16 << 20: 8}
"""Chunks that pass through a pool, small and large, and how many."""
LOADS = (0.5, 2.0)
"""Seconds of computing for each second of the disk, where both go on: once the disk is what takes longer."""


def passing(
    folder: str | os.PathLike[str], read: float, write: float, device: torch.device = HOST
) -> Traffic:
    """What a disk does for a pool, see `outcore.planning.passage`.

    Args:
        read: bytes per second that it reads where nothing else goes on.
        write: likewise.
        device: what computes beside it.

    Returns:
        With ``read`` and ``write`` as they are where both take turns, what computing and transfers cost each other,
        and the ``use`` of a small chunk.

    Raises:
        TierError: the disk can't be used.
    """
    seconds: dict[int, float] = {}
    uses: dict[int, float] = {}
    found: dict[int, Shared] = {}
    for nbytes, count in PASSING.items():
        with Passage(folder, nbytes, count) as passage:
            moved, start, own = passage.moved, time.perf_counter(), time.thread_time()
            laps = counted(passage.lap, SPAN)
            uses[nbytes] = (time.thread_time() - own) / (laps * count)
            seconds[nbytes] = (time.perf_counter() - start) * nbytes / max(nbytes, passage.moved - moved)
            found[nbytes] = shared(passage, nbytes, count, uses[min(PASSING)], device)
    small, large = PASSING
    each = max(0.0, (seconds[large] - seconds[small]) / (large - small))
    share = min(1.0, (1 / read + 1 / write) / 2 / each) if each else 1.0
    turn = max(0.0, seconds[small] - small * (1 / read + 1 / write) / 2 / share)
    price = sum(f.held for f in found.values()) / max(1e-9, sum(f.spent for f in found.values()))
    if device.type == "cpu" and torch.get_num_threads() >= cores.ours().count:
        price = max(1.0, price)  # a team waits for the one whose core was taken: what is less is noise
    costs = {nbytes: max(0.0, price) * f.spent / max(1.0, f.transfers) for nbytes, f in found.items()}
    io_each = max(0.0, costs[large] - costs[small]) / (large - small)
    return Traffic(
        read * share,
        write * share,
        turn,
        io_turn=max(0.0, costs[small] - small * io_each),
        io_rate=1 / io_each if io_each else 0.0,
        slowed=found[large].slowed,
        use=uses[small],
    )


@dataclass
class Shared:
    """What computing and transfers cost each other where a thread uses chunks and computes in between.

    Attributes:
        held: seconds that computing took longer.
        spent: processor seconds of the disk's threads meanwhile.
        transfers: meanwhile.
        slowed: the share of its speed that the disk kept while something was computed.
    """

    held: float = 0.0
    spent: float = 0.0
    transfers: float = 0.0
    slowed: float = 1.0


def shared(passage: Passage, nbytes: int, count: int, use: float, device: torch.device) -> Shared:
    """Let chunks pass, and compute in between.

    Args:
        nbytes: of a chunk.
        count: chunks of the passage.
        use: seconds of that thread for each use of a small chunk. What larger ones take more of it (their pages come
            and go) is counted as the disk's.
    """
    work = _little(device, mean(passage.lap, HOST) / count / 4)
    found = Shared()
    late = computed = 0.0
    for _ in range(ROUNDS):
        lap, alone = each(passage.lap, SPAN / 3), each(work, SPAN / 3)
        for load in LOADS:
            times = max(1, round(load * lap / count / alone))
            moved, io, waited = passage.moved, passage.spent, passage.waited
            start = time.perf_counter()
            laps = counted(partial(passage.lap, work, times), SPAN)
            elapsed = time.perf_counter() - start
            busy = elapsed - (passage.waited - waited)
            found.held += busy - laps * count * (times * alone + use)
            found.spent += passage.spent - io
            found.transfers += (passage.moved - moved) / nbytes
            if load < 1:  # the disk had work all the time
                late += elapsed - laps * lap
                computed += busy
    found.slowed = min(1.0, max(0.1, 1 - late / max(1e-9, computed)))
    return found


def _little(device: torch.device, seconds: float) -> Work:
    """A layer with so many rows that it takes less than so long, if there are as few."""
    rows = 2048
    work = layer(device, rows)
    while rows > 16 and each(work, SPAN / 30) > seconds:
        rows //= 2
        work = layer(device, rows)
    return work


class Disk:
    """A private file in a folder, read and written through the tier that runs use.

    Raises:
        TierError: the disk can't be used.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        count = DISK_SAMPLE // EXTENT
        self._regions = [reserve(EXTENT) for _ in range(min(4, count))]
        limit = DiskLimit(os.path.abspath(os.fspath(folder)), DISK_SAMPLE)
        self._tier = DiskTier.open([limit], ledger=Ledger())
        self._extents = [self._tier.allocate(EXTENT) for _ in range(count)]

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *error: object) -> None:
        self._tier.close()

    def rates(self) -> tuple[float, float]:
        """Bytes per second read and written."""
        for region in self._regions:
            region.tensor.random_(0, 256)
        wrote = mean(self._write, HOST)
        return DISK_SAMPLE / mean(self._read, HOST), DISK_SAMPLE / wrote

    def _write(self) -> None:
        regions = self._regions
        for future in [
            self._tier.write(e, regions[k % len(regions)].buffer) for k, e in enumerate(self._extents)
        ]:
            future.result()

    def _read(self) -> None:
        """Into fresh pages, as a pool does."""
        for first in range(0, len(self._extents), len(self._regions)):
            group = list(zip(self._extents[first : first + len(self._regions)], self._regions, strict=False))
            for _, region in group:
                region.release()
            for future in [self._tier.read(extent, region.buffer) for extent, region in group]:
                future.result()
