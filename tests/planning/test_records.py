"""docs/records.md says what benchmarks/records.py writes, by the row that costs least; and all rows are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "records.md"
CHEAP = "torchao"
"""The system whose row is made anew here."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import records

    yield records
    sys.modules.pop("records")


def test_the_page_has_the_rows_that_the_script_writes(records: Any) -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert tuple(rows[:2]) == records.HEAD
    assert [row.split(" | ")[:3] for row in rows[2:]] == [
        [f"| {record.system}", record.claim, record.machine.name] for record in records.RECORDS
    ]
    for record in records.RECORDS:
        if record.system == CHEAP:
            assert records.line(records.plan(record)) in rows


def test_a_page_gets_another_table(records: Any) -> None:
    assert records.paged("before\n\n| a |\n| b |\n\nafter\n", ["| c |"]) == "before\n\n| c |\n\nafter\n"
