"""A disk of a few megabytes, to fill it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 8 MiB of its own."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes the superuser, on Linux")
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "small", where], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mount refused: {mounted.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)
