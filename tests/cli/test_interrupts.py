"""Ctrl-C stops a run where everything is at rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calling import metrics, text

from outcore.cli.interrupts import Interrupts

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from outcore.cli.main import run
run()
"""


def test_the_first_is_noted_and_raised_at_the_check(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with Interrupts() as interrupts:
            interrupts.check()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                interrupts.check()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "once more to stop at once" in capfd.readouterr().err


def test_without_any_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_that_reads_and_writes_a_disk_stops(tmp_path: Path, times: int) -> None:
    arguments = ["train", "--model", "gpt2-tiny", "--data", str(text(tmp_path)), "--seq-len", "32"]
    arguments += ["--host-memory", "4MiB", "--disk", str(tmp_path), "--steps", "1000000"]
    arguments += ["--log-dir", str(tmp_path / "log"), "--device", "cpu"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until = time.monotonic() + 120
            line = tmp_path / "log" / "metrics.jsonl"
            while not (line.exists() and line.stat().st_size) and time.monotonic() < until:
                time.sleep(0.05)
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                time.sleep(0.01)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {"log", "words.txt"}
    assert metrics(tmp_path / "log")[0]["step"] == 1
