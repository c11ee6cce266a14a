"""A file system whose N-th operation fails."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from outcore.checkpoint.files import Files

WRITES = ("make_directory", "create", "write", "sync", "close", "rename", "lock", "names")
READS = ("open", "size", "read", "close", "names")
CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


def half(view: memoryview) -> int:
    return max(1, len(view) // 2)


@dataclass
class FaultyFiles(Files):
    """Counts the operations named, and lets one of them, or it and all later ones, fail.

    ``kind`` is ``"EIO"`` or ``"ENOSPC"``, ``"short"`` (half is moved, and said so), ``"none"`` (nothing is), or
    ``"late"`` (it takes its time).
    """

    operations: tuple[str, ...]
    at: int = 0
    kind: str = "EIO"
    forever: bool = False
    count: int = 0
    opened: set[int] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def _strikes(self, operation: str) -> bool:
        if operation not in self.operations:
            return False
        self.count += 1
        self.log.append(operation)
        struck = self.count == self.at or (self.forever and 0 < self.at < self.count)
        if struck and self.kind in CODES:
            raise OSError(CODES[self.kind], os.strerror(CODES[self.kind]))
        if struck and self.kind == "late":
            time.sleep(0.002 if self.forever else 0.03)
        return struck and self.kind in ("short", "none")

    def make_directory(self, path: Path) -> None:
        self._strikes("make_directory")
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._strikes("create")
        fd = super().create(path)
        self.opened.add(fd)
        return fd

    def open(self, path: Path) -> int:
        self._strikes("open")
        fd = super().open(path)
        self.opened.add(fd)
        return fd

    def size(self, fd: int) -> int:
        self._strikes("size")
        return super().size(fd)

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        if self._strikes("write"):
            return super().write(fd, view[: half(view)], offset) if self.kind == "short" else 0
        return super().write(fd, view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        if self._strikes("read"):
            return super().read(fd, view[: half(view)], offset) if self.kind == "short" else 0
        return super().read(fd, view, offset)

    def sync(self, fd: int) -> None:
        self._strikes("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)
        self.opened.discard(fd)
        self._strikes("close")

    def rename(self, old: Path, new: Path) -> None:
        self._strikes("rename")
        super().rename(old, new)

    def lock(self, path: Path) -> int | None:
        self._strikes("lock")
        fd = super().lock(path)
        if fd is not None:
            self.opened.add(fd)
        return fd

    def names(self, path: Path) -> list[str]:
        self._strikes("names")
        return super().names(path)
