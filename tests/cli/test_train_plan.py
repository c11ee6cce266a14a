"""outcore train --plan auto: the run's settings are searched, and its result is what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.calling import TINY, metrics, outcore, text
from outcore.planning.machine_file import write
from planning.accuracy import CPU


@pytest.fixture
def profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache" / "outcore").mkdir(parents=True)
    (tmp_path / "cache" / "outcore" / "machine.toml").write_text(write(CPU))


@pytest.mark.usefixtures("profiled")
def test_a_searched_run_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    data = text(tmp_path)
    common = ("train", *TINY, "--data", data, "--device", "cpu", "--steps", 2)
    plain = outcore(*common, "--log-dir", tmp_path / "a")
    planned = outcore(*common, "--plan", "auto", "--log-dir", tmp_path / "b")
    assert plain.exit_code == planned.exit_code == 0, planned.output
    assert "the fastest of" in planned.output
    assert [step["loss"] for step in metrics(tmp_path / "a")] == [
        step["loss"] for step in metrics(tmp_path / "b")
    ]
    assert "activations: keep" in planned.output  # with room for them nothing is computed twice
    assert "activations: recompute" in plain.output


@pytest.mark.usefixtures("profiled")
def test_what_is_named_stays(tmp_path: Path) -> None:
    common = ("train", *TINY, "--data", text(tmp_path), "--device", "cpu", "--steps", 1, "--plan", "auto")
    done = outcore(*common, "--activations", "recompute", "--microbatch", 1, "--log-dir", tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert "activations: recompute in slices of 1" in done.output


@pytest.mark.usefixtures("profiled")
def test_what_can_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    common = ("train", *TINY, "--data", text(tmp_path), "--device", "cpu", "--plan", "auto")
    done = outcore(*common, "--host-memory", "2MiB", "--log-dir", tmp_path / "a")
    assert done.exit_code == 2
    assert "the smallest budgets that would do" in done.output + done.stderr
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


@pytest.mark.emulated
@pytest.mark.usefixtures("profiled", "emu")
def test_where_there_is_an_accelerator_the_cpu_can_be_planned_for(tmp_path: Path) -> None:
    common = ("train", *TINY, "--data", text(tmp_path), "--steps", 1, "--plan", "auto")
    done = outcore(*common, "--device", "cpu", "--log-dir", tmp_path / "a")
    assert done.exit_code == 0, done.output
    assert outcore("plan", *TINY).exit_code == 0
    done = outcore(*common, "--log-dir", tmp_path / "b")
    assert done.exit_code == 2
    assert "of another device: run outcore profile --device emu again" in done.output + done.stderr


def test_a_search_wants_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    common = ("train", *TINY, "--data", text(tmp_path), "--device", "cpu", "--log-dir", tmp_path / "a")
    done = outcore(*common, "--plan", "auto")
    assert done.exit_code == 2
    assert "run outcore profile" in done.output + done.stderr
    done = outcore(*common, "--plan", "maybe")
    assert "--plan is auto or none" in done.output + done.stderr
