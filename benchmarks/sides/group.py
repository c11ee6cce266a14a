"""A memory control group (cgroup v1) for the contenders: each process that enters it shares one limit with nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/memory")


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A fresh group with that limit in bytes, removed at the end; ``None`` where it can't be made."""
    folder = ROOT / f"outcore-benchmark-{os.getpid()}"
    try:
        if not (ROOT / "memory.limit_in_bytes").exists():
            raise OSError("there is no cgroup v1 memory controller")
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        (folder / "memory.swappiness").write_text("0")
    except OSError as error:
        print(f"no memory group: {error}; contenders run without a limit")
        with suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(50):  # a process that has just ended may still be charged
            with suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def enter(folder: Path) -> None:
    """Move this process into a group; for a child between fork and exec."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
