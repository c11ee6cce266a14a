"""Kills at random moments: nothing is lost, nothing is left, and the result is the same to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_kills(kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "kill_loop.py"),
            "--kills",
            str(kills),
            "--steps",
            "30",
            "--longest",
            "0.6",
            "--folder",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout
