"""How many bytes a run may use on each tier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from outcore.errors import SizeError, UsageError
from outcore.memory.limits import Survey, TierLimits
from outcore.memory.places import check_place
from outcore.memory.sizes import parse_size

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

    def survey(self, device_available: int | None) -> Survey:
        """What is asked for and what this machine has, now.

        Args:
            device_available: bytes the accelerator has free; ``None`` where computing happens on the host.

        Raises:
            UsageError: a directory can't be used, or a device budget is given and there is no device.
        """
        disks = [(check_place(disk.path), disk.nbytes) for disk in self.disks()]
        host = None if self.host is None else parse_size(self.host)
        if device_available is not None:
            asked = None if self.device is None else parse_size(self.device)
            return Survey((asked, device_available), host, disks)
        if self.device is not None:
            raise UsageError(
                f"this run computes on the CPU, where a device budget ({self.device!r}) means nothing: "
                "leave it out"
            )
        return Survey(None, host, disks)

    def limits(self, device_available: int | None) -> TierLimits:
        """The bytes of each tier for a process that has this machine to itself.

        Raises:
            UsageError: as `survey`.
            BudgetError: more is asked for than there is.
        """
        return self.survey(device_available).limits()


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
