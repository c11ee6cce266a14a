"""How many bytes a run may use on each tier.

[Note: Safety shares]
Where the user says nothing, a tier gets what is free now, less a share that is left alone:

- device, 8 % and at least 256 MiB: allocators round up and splinter, and libraries (matrix products,
  convolutions, collectives) take workspace that appears in no plan;
- host, 10 % and at least 512 MiB: the interpreter, data loaders and other processes grow after the run has
  started, and the kernel kills without asking;
- disk, 5 % and at least 1 GiB: others write there too, and file systems slow down when nearly full.

Never more than half of what is free is left alone, so that a small machine can work too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from outcore.errors import BudgetError, SizeError, UsageError
from outcore.memory.cgroup import headroom
from outcore.memory.places import available_disk, check_place
from outcore.memory.sizes import format_size, parse_size

__all__ = [
    "Budget",
    "DiskLimit",
    "DiskPath",
    "TierLimits",
    "available_disk",
    "available_host",
    "host_capacity",
]

_SHARES = {"device": (0.08, 256 << 20), "host": (0.10, 512 << 20), "disk": (0.05, 1 << 30)}
"""Part, and least bytes, of what is free that a default leaves alone; see [Note: Safety shares]."""

Size = str | int


@dataclass(frozen=True)
class DiskPath:
    """A directory for the disk tier and the bytes that may be used there (``None``: what is free)."""

    path: str | os.PathLike[str]
    nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None:
            parse_size(self.nbytes)


Disk = str | os.PathLike[str] | DiskPath


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
class Budget:
    """What a run may use. Sizes as in `outcore.memory.sizes`; what is left out is taken from the machine.

    Args:
        device: bytes of accelerator memory for everything the run keeps there.
        host: bytes of DRAM, likewise.
        disk: ``"DIR"`` or ``"DIR:SIZE"``, a `DiskPath`, or several of them. No disk is used by default.

    Raises:
        SizeError: a size can't be read.
        UsageError: a disk is not a path.
    """

    device: Size | None = None
    host: Size | None = None
    disk: Disk | Sequence[Disk] | None = None

    def __post_init__(self) -> None:
        for size in (self.device, self.host):
            if size is not None:
                parse_size(size)
        self.disks()

    def disks(self) -> tuple[DiskPath, ...]:
        """The directories as they were given, with their sizes in bytes."""
        if self.disk is None:
            return ()
        if isinstance(self.disk, Sequence) and not isinstance(self.disk, str):
            return tuple(_disk_path(disk) for disk in self.disk)
        return (_disk_path(self.disk),)

    def limits(self, device_available: int | None, sharers: int = 1) -> TierLimits:
        """The bytes of each tier on this machine, now.

        Args:
            device_available: bytes the accelerator has free; ``None`` where computing happens on the host.
            sharers: processes with such a budget on this machine: what no size is given for is divided among them.

        Raises:
            UsageError: a directory can't be used, or a device budget is given and there is no device.
            BudgetError: more is asked for than there is.
        """
        disks = _disk_limits(self.disks(), sharers)
        return TierLimits(self._device(device_available), self._host(sharers), disks)

    def _device(self, available: int | None) -> int | None:
        if available is None:
            if self.device is not None:
                raise UsageError(
                    f"this run computes on the CPU, where a device budget ({self.device!r}) means nothing: "
                    "leave it out"
                )
            return None
        if self.device is None:
            return spare("device", available)
        return _at_most("device", parse_size(self.device), available, "is free on the accelerator")

    def _host(self, sharers: int) -> int:
        if self.host is None:
            return spare("host", available_host() // sharers)
        # Compared with all there is, not with what is free: the model to be moved may fill the host now.
        return _at_most(
            "host",
            parse_size(self.host),
            host_capacity(),
            "is all that the machine and its control group allow",
        )


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


def _at_most(tier: str, asked: int, there: int, who: str) -> int:
    if asked > there:
        raise BudgetError(tier, asked, there, f"{format_size(there)} {who}: ask for no more")
    return asked


def _disk_path(given: object) -> DiskPath:
    if isinstance(given, DiskPath):
        return given
    if isinstance(given, os.PathLike):
        return DiskPath(given)
    if not isinstance(given, str) or not given:
        raise UsageError(f"{given!r} is not a disk: write a directory, such as '/nvme' or '/nvme:400GiB'")
    path, colon, size = given.rpartition(":")
    if not colon or "/" in size or (not _is_size(size) and os.path.isdir(given)):
        return DiskPath(given)
    if not path:
        raise UsageError(f"{given!r} names no directory: write, for example, '/nvme:400GiB'")
    return DiskPath(path, parse_size(size))


def _is_size(text: str) -> bool:
    try:
        parse_size(text)
    except SizeError:
        return False
    return True


def _disk_limits(disks: Sequence[DiskPath], sharers: int) -> tuple[DiskLimit, ...]:
    """Directories on one file system share its space: first those with a size, the others in equal parts."""
    places = [check_place(disk.path) for disk in disks]
    for index, place in enumerate(places):
        if any(os.path.samefile(place.path, other.path) for other in places[:index]):
            raise UsageError(f"the directory {place.path} is named twice: once is enough")
    limits: dict[int, int] = {}
    for device in {place.device for place in places}:
        here = [k for k, place in enumerate(places) if place.device == device]
        free = available_disk(places[here[0]].path)
        asked = 0
        for k in here:
            size = disks[k].nbytes
            if size is not None:
                limits[k] = size
                asked += size
        _at_most("disk", asked, free, f"is free in {places[here[0]].path}")
        rest = [k for k in here if k not in limits]
        for k in rest:
            limits[k] = spare("disk", free - asked) // len(rest) // sharers
            if limits[k] == 0:
                raise BudgetError("disk", 1, 0, f"nothing is free in {places[k].path}: free some space there")
    return tuple(DiskLimit(place.path, limits[k]) for k, place in enumerate(places))
