"""What the control groups around this process leave of the host's memory and processors.

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
        for kind, folder, mount in _memberships(root, "memory")
        for group in _up(folder, mount)
        if (room := _group(group, _V2 if kind == _V2.kind else _V1)) is not None
    ]
    if not found:
        return None
    return Headroom(min(room.limit for room in found), min(room.free for room in found))


def processors(root: Path = Path("/")) -> float | None:
    """How many processors' time the groups around this process allow it; ``None`` without a quota."""
    found = []
    for kind, folder, mount in _memberships(root, "cpu"):
        for group in _up(folder, mount):
            if kind == _V2.kind:
                words = " ".join(_lines(group / "cpu.max")).split()
            else:
                words = [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
            if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
                found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _memberships(root: Path, controller: str) -> Iterator[tuple[str, Path, Path]]:
    """The kind, the process's folder and the mount point of each hierarchy that has a controller."""
    mounts = list(_mounts(root, controller))
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            wanted = _V2.kind
        elif controller in controllers.split(","):
            wanted = _V1.kind
        else:
            continue
        for kind, inside, point in mounts:
            if kind == wanted:
                mount = root / point.lstrip("/")
                yield kind, mount / _below(path, inside), mount


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    """Type, root inside the hierarchy and mount point of each mount that may have a controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, dash, after = line.partition(" - ")
        fields = before.split()
        kind, *_, options = after.split() or ("", "")
        has = kind == _V2.kind or (kind == _V1.kind and controller in options.split(","))
        if dash and has and len(fields) > 4:
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
