"""``outcore train`` under ``torchrun``: one log, the losses of one process, and any number of ranks goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.calling import metrics, outcore, text

SCRIPT = """
import os, signal
from outcore.cli.main import run
from outcore.optim.pipeline import Pipeline

begin, calls = Pipeline.begin, []

def dying(*arguments):
    calls.append(0)
    if len(calls) == {update}:
        {before}os.kill(os.getpid(), signal.SIGKILL)
    return begin(*arguments)

if os.environ.get("LOST", os.environ["RANK"]) == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Pipeline.begin = dying
if __name__ == "__main__":
    run()
"""
"""In its first life rank 1, or that of the machine to be lost, is killed at the beginning of an update (0: never)."""

MACHINE = "os.kill(os.getppid(), signal.SIGKILL); "
"""And with it who started it."""


def script(path: Path, update: int = 0, before: str = "") -> Path:
    found = path / f"script{update}.py"
    found.write_text(SCRIPT.format(update=update, before=before))
    return found


def start(path: Path, launcher: list[object], *arguments: object, **more: str) -> subprocess.Popen[str]:
    temporary = path / "temporary"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, (*launcher, *arguments))],
        env={
            **os.environ,
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def torchrun(path: Path, launcher: list[object], *arguments: object) -> tuple[int, str, str]:
    """Exit status and what was said, of ranks of this machine."""
    process = start(path, ["--standalone", *launcher], *arguments)
    out, said = ended(process)
    return process.returncode, out, said


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a launcher and its ranks said until they ended, which they do."""
    try:
        return process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def arguments(path: Path, steps: int, name: str) -> list[object]:
    flags = "train --model gpt2-tiny --device cpu --host-memory 96MiB --seq-len 32 --batch-size 4 --precision fp32"
    data = ["--data", path / "words.txt", "--log-dir", path / name, "--steps", steps]
    return [*flags.split(), *data, "--lr", "0.001", "--accumulate", "2"]


def kept(path: Path, *more: object) -> list[object]:
    return ["--checkpoint", path / "kept", "--every", 3, *more]


def alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Each step is there once, with the losses of the same samples."""
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["tokens"] == other["tokens"]


def test_two_ranks_train_one_is_killed_both_go_on_and_then_one_alone(tmp_path: Path) -> None:
    text(tmp_path)
    alone = outcore(*arguments(tmp_path, 6, "alone"))
    assert alone.exit_code == 0, alone.output
    launcher = ["--nproc-per-node", 2, "--max-restarts", 1, script(tmp_path, update=4)]
    code, out, said = torchrun(
        tmp_path, launcher, *arguments(tmp_path, 5, "two"), *kept(tmp_path, "--resume")
    )
    assert code == 0, said
    assert "rank 1 is gone" in said
    assert out.count("gpt2-tiny") == 2  # once in each life
    assert "going on from step-3" in " ".join(out.split())
    assert len(list((tmp_path / "temporary").glob("outcore*"))) <= 1  # that of the one that was killed
    resumed = outcore(*arguments(tmp_path, 6, "two"), *kept(tmp_path, "--resume"))
    assert resumed.exit_code == 0, resumed.output
    alike(metrics(tmp_path / "two"), metrics(tmp_path / "alone"))


@pytest.mark.slow
def test_a_machine_is_lost_and_fewer_ranks_go_on(tmp_path: Path) -> None:
    """Two launchers stand for two machines; one is killed with its rank, and the other does not wait for it."""
    text(tmp_path)
    alone = outcore(*arguments(tmp_path, 7, "alone"))
    assert alone.exit_code == 0, alone.output
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    meeting = f"--rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id 7"
    launcher = [*meeting.split(), "--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 2]
    run = [script(tmp_path, update=5, before=MACHINE), *arguments(tmp_path, 7, "two")]
    run += kept(tmp_path, "--resume")
    machines = [
        start(
            tmp_path,
            [*launcher, "--rdzv-conf", f"last_call_timeout=3,is_host={host}"],
            *run,
            LOST=str(1 - host),
        )
        for host in (1, 0)
    ]
    said = [ended(machine) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, -signal.SIGKILL], said
    assert "going on from step-3" in " ".join(said[0][0].split())
    alike(metrics(tmp_path / "two"), metrics(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--split", "speed"], ["--microbatch", "1"]], ids=["speed", "slices"])
def test_a_batch_that_can_not_be_divided_evenly(flags: list[str], tmp_path: Path) -> None:
    text(tmp_path)
    alone = outcore(*arguments(tmp_path, 4, "alone"), "--batch-size", 3)
    assert alone.exit_code == 0, alone.output
    launcher = ["--nproc-per-node", 2, script(tmp_path)]
    code, _, said = torchrun(tmp_path, launcher, *arguments(tmp_path, 4, "odd"), "--batch-size", 3, *flags)
    assert code == 0, said
    for row, other in zip(metrics(tmp_path / "odd"), metrics(tmp_path / "alone"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["tokens"] == other["tokens"]
