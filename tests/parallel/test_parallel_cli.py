"""``outcore train`` under ``torchrun``: one log, the losses of one process, and any number of ranks goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.calling import metrics, outcore, text


def torchrun(ranks: int, path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    script, temporary = path / "script.py", path / "temporary"
    temporary.mkdir(exist_ok=True)
    script.write_text("from outcore.cli.main import run\nif __name__ == '__main__':\n    run()\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def arguments(path: Path, steps: int, name: str) -> list[object]:
    flags = "train --model gpt2-tiny --device cpu --host-memory 96MiB --seq-len 32 --batch-size 4 --precision fp32"
    data = ["--data", path / "words.txt", "--log-dir", path / name, "--steps", steps]
    return [*flags.split(), *data, "--lr", "0.001", "--accumulate", "2"]


def test_two_ranks_train_and_one_goes_on(tmp_path: Path) -> None:
    text(tmp_path)
    alone = outcore(*arguments(tmp_path, 5, "alone"))
    assert alone.exit_code == 0, alone.output
    keep = ["--checkpoint", tmp_path / "kept", "--every", 3]
    two = torchrun(2, tmp_path, *arguments(tmp_path, 3, "two"), *keep)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("gpt2-tiny") == 1
    assert not list((tmp_path / "temporary").glob("outcore*"))
    resumed = outcore(*arguments(tmp_path, 5, "two"), *keep, "--resume")
    assert resumed.exit_code == 0, resumed.output
    expected, found = metrics(tmp_path / "alone"), metrics(tmp_path / "two")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    for row, other in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["tokens"] == other["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--split", "speed"], ["--microbatch", "1"]], ids=["speed", "slices"])
def test_a_batch_that_can_not_be_divided_evenly(flags: list[str], tmp_path: Path) -> None:
    text(tmp_path)
    alone = outcore(*arguments(tmp_path, 4, "alone"), "--batch-size", 3)
    assert alone.exit_code == 0, alone.output
    odd = torchrun(2, tmp_path, *arguments(tmp_path, 4, "odd"), "--batch-size", 3, *flags)
    assert odd.returncode == 0, odd.stderr
    for row, other in zip(metrics(tmp_path / "odd"), metrics(tmp_path / "alone"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert row["tokens"] == other["tokens"]
