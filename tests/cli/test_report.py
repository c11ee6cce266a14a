"""``outcore report``, from a run to its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import TINY, outcore, text
from typer.testing import Result


def train(folder: Path, *more: object) -> Result:
    return outcore("train", *TINY, "--data", text(folder), "--log-dir", folder / "log", "--steps", 4, *more)


def test_a_run_and_its_page(tmp_path: Path) -> None:
    result = train(tmp_path, "--host-memory", "3MiB", "--disk", tmp_path)
    assert result.exit_code == 0, result.output
    log = tmp_path / "log"
    assert [s["number"] for s in json.loads((log / "trace.json").read_text())["otherData"]["steps"]] == [
        2,
        3,
        4,
    ]
    assert "gpt2-tiny" in json.loads((log / "run.json").read_text())["plan"]["model"]
    assert "waits " in result.stdout
    result = outcore("report", log)
    assert result.exit_code == 0, result.output
    page = (log / "report.html").read_text()
    for said in ("A step, recorded", "transformer.h.0", "disk read", "3.0 MiB budget", "gpt2-tiny"):
        assert said in page
    other = tmp_path / "other.html"
    assert outcore("report", log, "--output", other).exit_code == 0
    assert other.read_text() == page


def test_which_steps_are_recorded_can_be_said(tmp_path: Path) -> None:
    assert train(tmp_path, "--trace-steps", "1").exit_code == 0
    trace = json.loads((tmp_path / "log" / "trace.json").read_text())
    assert [step["number"] for step in trace["otherData"]["steps"]] == [1]
    assert train(tmp_path, "--trace-steps", "none").exit_code == 0
    assert not (tmp_path / "log" / "trace.json").exists()  # that of the first run is no longer this run's
    assert (tmp_path / "log" / "trace.json.1").exists()
    assert (tmp_path / "log" / "run.json.1").exists()
    result = train(tmp_path, "--trace-steps", "never")
    assert result.exit_code == 2
    assert "--trace-steps" in result.stderr


@pytest.mark.parametrize("name", ["gone", "words.txt", "empty"])
def test_what_is_no_log_directory_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    text(tmp_path)
    (tmp_path / "empty").mkdir()
    result = outcore("report", tmp_path / name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("outcore: error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_page_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1, "tokens": 1, "seconds": 1}))
    result = outcore("report", tmp_path, "--output", tmp_path / "no" / "page.html")
    assert result.exit_code == 2
    assert "can't be written" in result.stderr
