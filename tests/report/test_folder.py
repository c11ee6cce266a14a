"""Log directories that are missing, empty, damaged or not ours: a sentence each, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded import log, row

from outcore.errors import UsageError
from outcore.report.folder import read


def test_a_whole_directory_is_read(tmp_path: Path) -> None:
    found = read(log(tmp_path / "run"))
    assert found.remarks == ()
    assert [row.step for row in found.rows] == list(range(1, 9))
    assert [record.number for record in found.records] == [2, 3, 8]
    assert found.settings["model"] == "blocks.0, a model"
    assert found.plan is not None
    assert found.plan.bottleneck == "the disk"


@pytest.mark.parametrize("name", ["gone", "file", "empty"])
def test_no_log_directory_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_that_is_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    folder = log(tmp_path)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    found = read(folder)
    assert len(found.rows) == 7
    assert found.remarks == ("Line 8 of metrics.jsonl can't be understood, perhaps cut off, and left out.",)


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "null", "7", '"x"', "{}", "\x00\x00", "[" * 100_000,
        json.dumps(row(3) | {"step": "3"}), json.dumps(row(3) | {"seconds": 0}), json.dumps(row(3) | {"seconds": -1}),
        json.dumps(row(3) | {"seconds": None}), json.dumps(row(3) | {"tokens": True}), json.dumps(row(3) | {"held": 3}),
        json.dumps(row(3) | {"held": {"host": "x"}}), json.dumps(row(3) | {"budget": [1]}),
        json.dumps(row(3)).replace("1024.0", "1" + "0" * 400).replace('"tokens": 1024', '"tokens": 1' + "0" * 400),
        json.dumps(row(3) | {"step": float("nan")}), json.dumps(row(3) | {"compute": float("inf")}),
    ],
)  # fmt: skip
def test_any_bad_line_is_left_out(line: str, tmp_path: Path) -> None:
    folder = log(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:2], line, *lines[3:]]), encoding="utf-8")
    found = read(folder)
    assert [row.step for row in found.rows] == [1, 2, 4, 5, 6, 7, 8]
    assert len(found.remarks) == (1 if line else 0)


def test_many_bad_lines_are_said_once(tmp_path: Path) -> None:
    folder = log(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("x\n" * 5)
    assert read(folder).remarks == (
        "5 lines (9, 10, 11, ...) of metrics.jsonl can't be understood, perhaps cut off, and left out.",
    )


def test_bytes_that_are_not_text_are_survived(tmp_path: Path) -> None:
    folder = log(tmp_path)
    for name in ("metrics.jsonl", "trace.json", "run.json", "plan.json"):
        path = folder / name
        path.write_bytes(path.read_bytes() + b"\xff\xfe\x00" if name == "metrics.jsonl" else b"\xff\xfe\x00")
    found = read(folder)
    assert len(found.rows) == 8
    assert len(found.remarks) == 4


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", "[" * 100_000, '{"plan": 3, "otherData": 3, "peak_bytes": 3}']
)
@pytest.mark.parametrize("name", ["trace.json", "run.json", "plan.json"])
def test_a_damaged_file_is_said_and_the_rest_is_shown(name: str, text: str, tmp_path: Path) -> None:
    folder = log(tmp_path)
    (folder / name).write_text(text)
    found = read(folder)
    assert len(found.rows) == 8
    said = [remark for remark in found.remarks if name in remark]
    if (name, text) == ("plan.json", "{}"):  # nothing in it is required
        assert said == []
    else:
        assert len(said) == 1


def test_a_directory_in_place_of_a_file_is_said(tmp_path: Path) -> None:
    folder = log(tmp_path)
    (folder / "trace.json").unlink()
    (folder / "trace.json").mkdir()
    assert read(folder).remarks == ("trace.json can't be read: Is a directory.",)


def test_a_trace_alone_is_enough(tmp_path: Path) -> None:
    folder = log(tmp_path)
    (folder / "metrics.jsonl").unlink()
    found = read(folder)
    assert found.rows == ()
    assert len(found.records) == 3
    assert "metrics.jsonl" in found.remarks[0]


def test_metrics_alone_are_enough(tmp_path: Path) -> None:
    folder = log(tmp_path)
    for name in ("trace.json", "run.json", "plan.json"):
        (folder / name).unlink()
    found = read(folder)
    assert len(found.rows) == 8
    assert len(found.remarks) == 1
    assert "--trace-steps" in found.remarks[0]
