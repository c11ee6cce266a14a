"""The benchmarks that set outcore beside others: their contenders do the same work, and their sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(BENCHMARKS.parent / "src")
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )


def test_contenders_train_alike(tmp_path: Path) -> None:
    """Not to the bit, as autocast rounds elsewhere than outcore; but the same model on the same batches."""
    from sides.turn import train

    common: dict[str, Any] = dict(model="gpt2-tiny", rows=2, tokens=32, device="cpu", disk=str(tmp_path))
    losses = {}
    for contender in ("outcore, host", "outcore, disk", "torch"):
        asked = dict(common, contender=contender, budget={"host": "64MiB"}, warm=1, steps=3)
        found = train(asked)
        assert len(found["seconds"]) == len(found["update"]) == 3
        losses[contender] = found["loss"]
    assert losses["outcore, host"] == losses["outcore, disk"]
    assert losses["torch"] == pytest.approx(losses["outcore, host"], rel=2e-3)


def test_ranks_train_alike_and_count_together(tmp_path: Path) -> None:
    """Two ranks as `benchmarks/peers_ranks.py` starts them."""
    from sides.turns import Place, take_turns

    common: dict[str, Any] = dict(model="gpt2-tiny", rows=1, tokens=32, device="cpu", warm=1, steps=2)
    names = ("outcore, host", "fsdp2")
    asked = {name: dict(common, contender=name, budget={"host": "64MiB"}) for name in names}
    scores = take_turns(asked, Place(tmp_path, 1, ranks=2), 1)
    for name in names:
        [turn] = scores[name].turns or pytest.fail(str(scores[name].failure))
        assert len(turn["seconds"]) == len(turn["processor"]) == 2
        assert 0 < turn["peak_steps"] <= turn["peak_rss"]
    losses = [score.turns[0]["loss"] for score in scores.values()]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_generation_from_disk(tmp_path: Path) -> None:
    from sides.generation import forget_pages, generate, write_weights

    nbytes = write_weights("gpt2-tiny", tmp_path / "weights")
    assert nbytes > 1 << 20
    forget_pages(tmp_path / "weights")
    found = generate(
        "outcore",
        model="gpt2-tiny",
        weights=str(tmp_path / "weights"),
        rows=1,
        tokens=8,
        new_tokens=4,
        device="cpu",
        disk=str(tmp_path),
        budget={"host": "16MiB"},
    )
    assert len(found["tokens"]) == 4
    assert len(found["seconds"]) == 3


def test_ratios() -> None:
    from peers import training_ratios
    from sides.turns import Score

    def score(name: str, seconds: float, rss: int, **moved: float) -> Score:
        return Score(name, [{"seconds": [seconds] * 2, "processor": [1.0], "peak_rss": rss, "moved": moved}])

    scores = {
        s.name: s
        for s in (
            score("outcore, host", 2.0, 100),
            score("torch", 3.0, 100),
            score("outcore, disk", 4.0, 50, **{"disk read": 2e9, "disk write": 1e9}),
            score("deepspeed, disk", 8.0, 200),
        )
    }
    scores["fsdp2"] = Score("fsdp2", failure="not done")
    found = training_ratios(scores, {"disk read": 1e9, "disk write": 1e9})
    assert found["host_vs_torch"] == 1.5
    assert found["disk_vs_deepspeed"] == 2.0
    assert found["disk_rss_vs_deepspeed"] == 0.25
    assert found["disk_vs_roofline"] == 0.75
    assert "host_vs_fsdp2" not in found
    assert "host_vs_deepspeed" not in found


def test_without_a_memory_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sides import group

    monkeypatch.setattr(group, "ROOT", tmp_path / "missing")
    with group.memory_group(1 << 30) as folder:
        assert folder is None
    assert "run without a limit" in capsys.readouterr().out


def test_gpu_refuses_without_an_accelerator() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    done = run("gpu.py")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("there is no accelerator here")


@pytest.mark.slow
def test_gpu_quick(tmp_path: Path) -> None:
    """All contenders at tiny shapes, on the emulated accelerator where there is no other."""
    done = run("gpu.py", "--quick", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    for model in ("gpt2-tiny", "llama-tiny"):
        assert set(found["models"][model]["median_s"]) == {"outcore, host", "fsdp2", "torch", "compute"}
        turn = found["models"][model]["readings"]["outcore, host"]["turns"][0]
        assert 0 < turn["peak_device"] <= 64 << 20
        assert turn["moved"]["device out"] > 0
