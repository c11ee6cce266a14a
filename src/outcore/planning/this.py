"""The machine that this process runs on: sizes as they are now, speeds as ``outcore profile`` measured them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from outcore.errors import UsageError
from outcore.memory.device import find, free_bytes, offers
from outcore.memory.limits import host_capacity
from outcore.memory.places import available_disk
from outcore.planning.machine import Machine
from outcore.planning.machine_file import read
from outcore.planning.replay import HOST
from outcore.planning.timebook import Timebook
from outcore.planning.timing import Replays, Timing


def profile_path() -> Path:
    """Where the profile of this machine is kept: ``$XDG_CACHE_HOME/outcore`` or ``~/.cache/outcore``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (
        Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    )  # the rule of the XDG specification
    return folder / "outcore" / "machine.toml"


@dataclass(frozen=True)
class Here(Machine):
    """A machine that is at hand: what it computes is run rather than rated.

    Attributes:
        at: what computes.
    """

    at: torch.device = HOST

    @classmethod
    def of(cls, machine: Machine, at: torch.device) -> Here:
        """The same machine, known to be this one."""
        return cls(**{field.name: getattr(machine, field.name) for field in fields(Machine)}, at=at)

    def timing(self) -> Timing:
        if self.at.type != "cpu" and not offers(self.at).storages:
            return super().timing()  # where operators are only noted down, there is nothing to run one by one
        book = Timebook(profile_path().with_name("spans.json"), self.date)
        return Replays(self, book, device=self.at)


def sizes(device: torch.device, folder: str | os.PathLike[str] | None) -> tuple[int | None, int, int]:
    """Bytes of device, host and disk on this machine.

    Args:
        folder: a directory on the disk that would be used; none: no disk.
    """
    on_device = None if device.type == "cpu" else free_bytes(device)
    return on_device, host_capacity(), 0 if folder is None else available_disk(folder)


def this(folder: str | os.PathLike[str] | None = None, device: torch.device | None = None) -> Machine:
    """This machine.

    Args:
        folder: where its disk is measured; by default that of the profile's.
        device: what computes; by default that of the profile's.

    Raises:
        UsageError: it has not been profiled, or its profile is of another device.
    """
    path = profile_path()
    if not path.is_file():
        raise UsageError("this machine's speeds are not known yet: run outcore profile --disk DIR first")
    found = read(path)
    device = _profiled(found) if device is None else device
    on_device, host, disk = sizes(device, folder)
    if (on_device is None) != (found.device is None):
        raise UsageError(
            f"the profile in {path} is of another device: run outcore profile --device {device.type} again"
        )
    return replace(
        Here.of(found, device), device=on_device, host=host, disk=found.disk if folder is None else disk
    )


def _profiled(profile: Machine) -> torch.device:
    """The device that a profile is of, which its name ends with; should it be gone, what computes here by default."""
    if profile.device is None:
        return torch.device("cpu")
    try:
        return find(profile.name.rpartition(", ")[2])
    except UsageError:
        return find(None)
