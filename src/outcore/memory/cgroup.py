"""What the control groups around this process leave of the host's memory.

A container's limit is often on an outer group, and the kernel kills when any of them is full, so every group
from the process up to the mount is asked, in both versions of the interface. The page cache that a group
is charged for counts as free: the kernel takes it back before it kills.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True)
class Headroom:
    """Bytes of the tightest group: what it may hold, and what is left of that now."""

    limit: int
    free: int


@dataclass(frozen=True)
class _Interface:
    kind: str
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """Lines of ``memory.stat`` that count page cache on the lists from which it is reclaimed."""


# Above memory.high the kernel slows a group down until it stands still: as good as a limit.
_V2 = _Interface("cgroup2", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Interface(
    "cgroup",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def headroom(root: Path = Path("/")) -> Headroom | None:
    """The least of what the groups around this process allow and leave free; ``None`` without a limit.

    Args:
        root: where ``/proc`` and the mounts are found; for tests.
    """
    found = [
        room
        for interface, folder, mount in _memberships(root)
        for group in _up(folder, mount)
        if (room := _group(group, interface)) is not None
    ]
    if not found:
        return None
    return Headroom(min(room.limit for room in found), min(room.free for room in found))


def _memberships(root: Path) -> Iterator[tuple[_Interface, Path, Path]]:
    """The interface, the process's folder and the mount point of each hierarchy that limits memory."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            interface = _V2
        elif "memory" in controllers.split(","):
            interface = _V1
        else:
            continue
        for kind, inside, point in mounts:
            if kind == interface.kind:
                mount = root / point.lstrip("/")
                yield interface, mount / _below(path, inside), mount


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Type, root inside the hierarchy and mount point of each mount that may limit memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields = before.split()
        kind, *_, options = after.split() or ("", "")
        memory = kind == _V2.kind or (kind == _V1.kind and "memory" in options.split(","))
        if dash and memory and len(fields) > 4:
            yield kind, _unescape(fields[3]), _unescape(fields[4])


def _below(path: str, inside: str) -> str:
    """A group's path below the mount; the mount itself where the group can't be seen from here."""
    try:
        below = PurePosixPath(path).relative_to(inside)
    except ValueError:
        return "."
    return "." if ".." in below.parts else str(below)


def _up(folder: Path, mount: Path) -> Iterator[Path]:
    """The folder and all above it, to the mount point."""
    while True:
        yield folder
        if folder == mount:
            return
        folder = folder.parent


def _group(folder: Path, interface: _Interface) -> Headroom | None:
    limits = [_number(folder / name) for name in interface.limits]
    limit = min((n for n in limits if n is not None and n < _UNLIMITED), default=None)
    usage = _number(folder / interface.usage)
    if limit is None or usage is None:
        return None
    cache = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in interface.cache:
            cache += int(value)
    return Headroom(limit, max(0, limit - max(0, usage - cache)))


def _number(path: Path) -> int | None:
    """A number in a file; ``None`` if there is none, such as ``max``."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _unescape(text: str) -> str:
    """Undo the octal escapes of ``mountinfo``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
