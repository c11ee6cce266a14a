"""Signals stop a run where everything is at rest, and with --checkpoint nothing is lost."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calling import metrics, text
from calling import outcore as call

import outcore
from outcore.checkpoint.interrupts import ECHO
from outcore.cli.train import _ending
from outcore.report.metrics import Metrics
from outcore.report.step import Step

COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from outcore.cli.main import run
run()
"""

SLOW = """
import time
from outcore.cli import loop
before = loop.outcore.snapshot
def snapshot(model):
    with open({marks!r}, "a") as file:
        file.write("in a step\\n")
    time.sleep({seconds})
    return before(model)
loop.outcore.snapshot = snapshot
"""

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
EITHER = pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
"""What comes after the signal was taken is the same for both."""

TINY = ("--model", "gpt2-tiny", "--seq-len", "32", "--host-memory", "4MiB", "--device", "cpu")


@contextmanager
def started(folder: Path, *more: object, slow: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A long run that has taken its first step."""
    words = folder / "words.txt"
    data = words if words.exists() else text(folder)
    arguments = ["train", *TINY, "--data", str(data), "--disk", str(folder), "--log-dir", str(folder / "log")]
    if "--steps" not in more:
        more = ("--steps", 1_000_000, *more)
    marks = folder / "marks"
    command = SLOW.format(seconds=slow, marks=str(marks)) + COMMAND if slow else COMMAND
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments, *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            until = time.monotonic() + 120
            line = folder / "log" / "metrics.jsonl"
            while not (line.exists() and line.stat().st_size) and time.monotonic() < until:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            # The line is written before a step is over: a signal now might find nothing left to finish.
            before = marks.stat().st_size if slow else 0
            while slow and marks.stat().st_size == before and time.monotonic() < until:
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@BOTH
@pytest.mark.parametrize("times", [1, 2])
def test_without_checkpoints_a_run_stops_and_its_exit_code_tells(
    tmp_path: Path, times: int, number: signal.Signals
) -> None:
    with started(tmp_path) as process:
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.01)
        _, said = process.communicate(timeout=60)
    left = (
        128 + number,
        *([-number] if times == 2 else []),
    )  # the second may come when nobody listens any more
    assert process.returncode in left, said
    assert f"outcore: {number.name}: stopping at the end of this pass; once more" in said
    assert "Traceback" not in said
    assert names(tmp_path) == {"log", "words.txt"}
    assert metrics(tmp_path / "log")[0]["step"] == 1


@EITHER
def test_with_checkpoints_the_step_is_saved_and_the_command_to_go_on_is_said(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path, "--checkpoint", tmp_path / "run", "--lr", "1e-3") as process:
        os.killpg(process.pid, number)  # as a terminal and a service manager do
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"{number.name}: stopping at the end of this step within 300 s; once more" in errors
    last = metrics(tmp_path / "log")[-1]["step"]
    assert f"stopped after step {last} of 1000000, saved in {tmp_path / 'run'}/step-{last}\n" in said
    outcore.verify(tmp_path / "run" / f"step-{last}")
    [command] = re.findall("^resume with: outcore (.*)$", said, re.M)
    arguments = shlex.split(command)
    assert arguments[-1] == "--resume"
    assert "--grace" not in arguments
    arguments[arguments.index("--steps") + 1] = str(last + 3)
    assert call(*arguments).exit_code == 0
    words = tmp_path / "again"
    whole = arguments[:-1]
    whole[whole.index("--checkpoint") + 1] = str(words)
    whole[whole.index("--log-dir") + 1] = str(words)
    assert call(*whole).exit_code == 0
    assert [line["loss"] for line in metrics(tmp_path / "log")] == [line["loss"] for line in metrics(words)]


def test_a_kill_loses_only_what_was_not_saved(tmp_path: Path) -> None:
    more = ("--checkpoint", tmp_path / "run", "--every", 1)
    with started(tmp_path, *more) as process:
        time.sleep(0.3)
        process.kill()
        process.communicate(timeout=60)
    arguments = ("--data", tmp_path / "words.txt", "--log-dir", tmp_path / "log", *more)
    steps = metrics(tmp_path / "log")[-1]["step"] + 2 if (tmp_path / "log").exists() else 3
    result = call("train", *TINY, *arguments, "--host-memory", "1GiB", "--steps", steps, "--resume")
    assert result.exit_code == 0, result.output
    found = metrics(tmp_path / "log")
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert not [name for name in names(tmp_path / "run") if name.startswith(".tmp-")]
    more = ("--data", tmp_path / "words.txt", "--log-dir", tmp_path / "whole")
    assert call("train", *TINY, *more, "--host-memory", "1GiB", "--steps", steps).exit_code == 0
    assert [line["loss"] for line in metrics(tmp_path / "whole")] == [line["loss"] for line in found]


@EITHER
def test_a_second_signal_leaves_at_once_in_the_middle_of_a_step(
    tmp_path: Path, number: signal.Signals
) -> None:
    with started(tmp_path, "--checkpoint", tmp_path / "run", slow=3) as process:
        start = time.monotonic()
        process.send_signal(number)
        while time.monotonic() - start < ECHO + 0.2:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        took = time.monotonic() - start
    assert process.returncode == 128 + number, said
    assert took < 2.9
    assert f"{number.name} again: stopped at once; resume with: outcore train" in said
    assert not (tmp_path / "run").exists()


def test_the_grace_ends(tmp_path: Path) -> None:
    more = ("--checkpoint", tmp_path / "run", "--grace", "0.3")
    with started(tmp_path, *more, slow=3) as process:
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        took = time.monotonic() - start
    assert process.returncode == 143, said
    assert "within 0.3 s" in said
    assert "the grace of 0.3 s is over; resume with: outcore train" in said
    assert took < 2.5


def test_a_run_whose_reader_is_gone_is_saved_all_the_same(tmp_path: Path) -> None:
    """``outcore train | tee log``: what ends the run in a terminal ends ``tee``, too."""
    with started(tmp_path, "--checkpoint", tmp_path / "run") as process:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    last = metrics(tmp_path / "log")[-1]["step"]
    outcore.verify(tmp_path / "run" / f"step-{last}")


@pytest.mark.parametrize("more", [(), ("--checkpoint", "run")], ids=["alone", "with checkpoints"])
def test_a_log_that_can_not_be_written_stops_a_run_which_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """Also lines that are still in memory can't be flushed then."""
    write = Metrics.write

    def refused(self: Metrics, step: Step) -> None:
        write(self, step)
        if step.number == 3:
            self._file.close()
            self._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
            write(self, step)

    monkeypatch.setattr(Metrics, "write", refused)
    monkeypatch.chdir(tmp_path)
    where = ("--data", text(tmp_path), "--log-dir", tmp_path / "log", "--device", "cpu")
    result = call("train", *TINY, *where, "--host-memory", "64MiB", "--steps", 9, *more)
    assert result.exit_code == 1
    assert "the metrics can't be written" in result.stderr
    assert "No space left" in result.stderr
    assert [line["step"] for line in metrics(tmp_path / "log")] == [1, 2, 3]
    if more:
        assert "stopped after step 3 of 9, saved in run/step-3" in result.stdout
        outcore.verify(tmp_path / "run" / "step-3")


@pytest.mark.parametrize("second", [True, False], ids=["again", "the grace"])
def test_nobody_needs_to_hear_of_a_signal(second: bool) -> None:
    """The process ends at a second one, and at the end of the grace, though nobody reads its stderr any more."""
    code = f"""
import os, signal, threading, outcore
read, write = os.pipe()
os.dup2(write, 2)
os.close(write), os.close(read)
with outcore.Interrupts(grace={600 if second else 0.1}) as interrupts:
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts._said.wait(30)
    if {second}:
        os.kill(os.getpid(), signal.SIGTERM)  # an echo
        threading.Event().wait({ECHO} + 0.1)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(30)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 143


@pytest.mark.parametrize("launched", [True, False])
def test_torchruns_own_patience_is_said(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert ("--shutdown-timeout" in _ending()) is launched


def test_before_the_first_step_there_is_nothing_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = outcore.offload
    made: list[outcore.Interrupts] = []

    class Noted(outcore.Interrupts):
        def __enter__(self) -> outcore.Interrupts:
            made.append(self)
            return super().__enter__()

    def interrupted(*arguments: object, **more: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return offload(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(outcore, "offload", interrupted)
    monkeypatch.setattr(outcore, "Interrupts", Noted)
    try:
        arguments = (
            "--data",
            text(tmp_path),
            "--disk",
            tmp_path,
            "--checkpoint",
            tmp_path / "run",
            "--steps",
            3,
        )
        result = call("train", *TINY, *arguments)
    finally:
        made[0].close()
    assert result.exit_code == 0, result.output
    assert "stopped after step 0 of 3, nothing to save yet\nresume with: outcore train" in result.stdout
    assert not (tmp_path / "run").exists()
