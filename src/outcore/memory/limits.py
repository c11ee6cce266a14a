"""What a run gets of each tier: what it asks for, and what the machine has.

[Note: Safety shares]
Where the user says nothing, a tier gets what is free now, less a share that is left alone:

- device, 8 % and at least 256 MiB: allocators round up and splinter, and libraries (matrix products,
  convolutions, collectives) take workspace that appears in no plan;
- host, 10 % and at least 512 MiB: the interpreter, data loaders and other processes grow after the run has
  started, and the kernel kills without asking;
- disk, 5 % and at least 1 GiB: others write there too, and file systems slow down when nearly full.

Never more than half of what is free is left alone, so that a small machine can work too.

[Note: One machine, several ranks]
Ranks of one machine share its memory and its file systems, so what they ask for is held against them together. Each
looks at what is free before any of them takes something (`Survey`), says what it asks for, and hears it of the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from outcore.errors import BudgetError, UsageError
from outcore.memory.cgroup import headroom
from outcore.memory.places import Place, available_disk
from outcore.memory.sizes import format_size

_SHARES = {"device": (0.08, 256 << 20), "host": (0.10, 512 << 20), "disk": (0.05, 1 << 30)}
"""Part, and least bytes, of what is free that a default leaves alone; see [Note: Safety shares]."""


@dataclass(frozen=True)
class DiskLimit:
    """A directory that can be used and the bytes that may be used there."""

    path: str
    nbytes: int


@dataclass(frozen=True)
class TierLimits:
    """Bytes per tier. ``device`` is ``None`` where computing happens on the host; ``disk`` may be empty."""

    device: int | None
    host: int
    disk: tuple[DiskLimit, ...]


@dataclass(frozen=True)
class Asked:
    """Bytes that processes of one machine ask for.

    Attributes:
        host: of DRAM.
        disk: of each file system, by its number.
    """

    host: int = 0
    disk: Mapping[int, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        """As bytes for other ranks."""
        return json.dumps([self.host, list(self.disk.items())]).encode()

    @staticmethod
    def together(said: Iterable[bytes]) -> Asked:
        """What several said, by `pack`."""
        host, disk = 0, dict[int, int]()
        for more, disks in map(json.loads, said):
            host += more
            for device, nbytes in disks:
                disk[device] = disk.get(device, 0) + nbytes
        return Asked(host, disk)


class Survey:
    """What a budget asks for and what there is, at this moment.

    Args:
        device: bytes that are asked for, and those that are free; ``None`` where computing happens on the host.
        host: bytes that are asked for; ``None``: what is free.
        disks: likewise, for each directory.

    Attributes:
        asked: what is asked for by number, as other processes of this machine must know it.
    """

    def __init__(
        self,
        device: tuple[int | None, int] | None,
        host: int | None,
        disks: Sequence[tuple[Place, int | None]],
    ) -> None:
        for index, (place, _) in enumerate(disks):
            if any(os.path.samefile(place.path, other.path) for other, _ in disks[:index]):
                raise UsageError(f"the directory {place.path} is named twice: once is enough")
        self._device, self._host, self._disks = device, host, disks
        # compared with all there is, not with what is free: the model to be moved may fill the host now
        self._host_there = available_host() if host is None else host_capacity()
        self._free = {place.device: available_disk(place.path) for place, _ in reversed(disks)}
        asked = {device: self._asked_of(device) for device in self._free}
        self.asked = Asked(host or 0, {device: nbytes for device, nbytes in asked.items() if nbytes})

    def _asked_of(self, device: int) -> int:
        return sum(size or 0 for place, size in self._disks if place.device == device)

    def limits(self, sharers: int = 1, together: Asked | None = None) -> TierLimits:
        """The bytes of each tier.

        Args:
            sharers: processes of this machine that ask: what no size is given for is divided among them.
            together: what they ask for; by default what this one does.

        Raises:
            BudgetError: more is asked for than there is.
        """
        together = together or self.asked
        return TierLimits(
            self._device_limit(), self._host_limit(sharers, together), self._disk_limits(sharers, together)
        )

    def _device_limit(self) -> int | None:
        if self._device is None:
            return None
        asked, available = self._device
        if asked is None:
            return spare("device", available)
        return _at_most("device", asked, asked, available, "is free on the accelerator")

    def _host_limit(self, sharers: int, together: Asked) -> int:
        if self._host is None:
            return spare("host", self._host_there // sharers)
        there = "is all that the machine and its control group allow"
        return _at_most("host", self._host, together.host, self._host_there, there)

    def _disk_limits(self, sharers: int, together: Asked) -> tuple[DiskLimit, ...]:
        """Directories on one file system share its space: first those with a size, the others in equal parts."""
        limits = []
        for place, size in self._disks:
            free, asked = self._free[place.device], together.disk.get(place.device, 0)
            own = self._asked_of(place.device)
            _at_most("disk", own, asked, free, f"is free in {place.path}")
            if size is None:
                rest = sum(other.device == place.device and size is None for other, size in self._disks)
                size = spare("disk", free - asked) // rest // sharers
                if size == 0:
                    raise BudgetError("disk", 1, 0, f"nothing is free in {place.path}: free some space there")
            limits.append(DiskLimit(place.path, size))
        return tuple(limits)


def available_host(_root: Path = Path("/")) -> int:
    """Bytes of DRAM that can be taken now.

    The least of what the machine has available and what each enclosing control group leaves, both with
    reclaimable page cache counted as free.
    """
    machine = int(psutil.virtual_memory().available)
    room = headroom(_root)
    return machine if room is None else min(machine, room.free)


def host_capacity(_root: Path = Path("/")) -> int:
    """Bytes of DRAM this process could ever have: the machine's, within its control groups' limits."""
    machine = int(psutil.virtual_memory().total)
    room = headroom(_root)
    return machine if room is None else min(machine, room.limit)


def spare(tier: str, available: int) -> int:
    """What a default takes of the bytes that are free on a tier; see [Note: Safety shares]."""
    part, least = _SHARES[tier]
    return available - min(max(int(available * part), least), available // 2)


def _at_most(tier: str, own: int, together: int, there: int, who: str) -> int:
    """What this process asks for, if all of them can have it."""
    if together <= there:
        return own
    others = (
        "" if own == together else f", and the ranks of this machine ask for {format_size(together)} together"
    )
    raise BudgetError(tier, together, there, f"{format_size(there)} {who}{others}: ask for no more")
