"""What a log directory holds, read with care: a file that is missing or damaged is said, not fatal.

Read are ``metrics.jsonl`` (`outcore.report.metrics`), ``run.json`` (`outcore.report.run`), ``trace.json``
(`outcore.report.chrome`) and ``plan.json``. The last is an object as ``outcore plan --json`` prints it, of which three
fields are read, none of them required: ``peak_bytes`` (tier to bytes), and in ``step`` its ``seconds`` and its
``bottleneck`` (words).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.errors import UsageError
from outcore.report import chrome, metrics, run
from outcore.report.timeline import Record

PLAN = "plan.json"
_TOLD = 3
"""The most damaged lines that are named one by one."""


@dataclass(frozen=True)
class Row:
    """A line of ``metrics.jsonl``: see `outcore.report.metrics`. ``None`` where a number was not finite."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens: float
    seconds: float
    skipped: float
    held: Mapping[str, float]
    peak: Mapping[str, float]
    budget: Mapping[str, float]
    moved: Mapping[str, float]
    waited: Mapping[str, float]
    compute: float
    update: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step, in the order in which they are shown."""
        waits = {f"waiting for {link}": seconds for link, seconds in self.waited.items()}
        return {"compute": self.compute, **waits, "update": self.update}


@dataclass(frozen=True)
class Plan:
    """What was expected of the run."""

    peak_bytes: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    bottleneck: str = ""


@dataclass(frozen=True)
class Folder:
    """A log directory.

    Attributes:
        rows: in the order of the file.
        settings: what the run was asked to do.
        records: the steps that were recorded.
        remarks: what is missing or damaged, a sentence each.
    """

    path: Path
    rows: tuple[Row, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    plan: Plan | None = None
    remarks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name


def read(directory: Path) -> Folder:
    """Read all that a log directory holds.

    Raises:
        UsageError: there is no such directory, or nothing of a run in it.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "doesn't exist"
        raise UsageError(f"the log directory {directory} {what}: give the one that outcore train wrote")
    remarks: list[str] = []
    rows = _rows(directory / metrics.NAME, remarks)
    records = _records(directory / chrome.NAME, remarks)
    if not rows and not records:
        raise UsageError(
            f"there is nothing to report in {directory}: " + (" ".join(remarks) or "no steps were written")
        )
    settings = _settings(directory / run.NAME, remarks)
    return Folder(
        directory, tuple(rows), settings, tuple(records), _plan(directory / PLAN, remarks), tuple(remarks)
    )


# -- the files ----------------------------------------------------------------------------------------


def _text(path: Path, remarks: list[str], missing: str) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if missing:
            remarks.append(f"There is no {path.name}: {missing}.")
    except OSError as error:
        remarks.append(f"{path.name} can't be read: {error.strerror or error}.")
    return None


def _object(path: Path, remarks: list[str], missing: str = "") -> Any:
    text = _text(path, remarks, missing)
    if text is None:
        return None
    try:
        found = json.loads(text)
        return () if found is None else found  # null is not what anybody wrote, but it is there
    except (ValueError, RecursionError):
        remarks.append(f"{path.name} is damaged: it is not valid JSON, and is left out.")
        return None


def _rows(path: Path, remarks: list[str]) -> list[Row]:
    text = _text(path, remarks, "loss, throughput and the split of a step's time are missing")
    rows: list[Row] = []
    bad: list[int] = []
    for number, line in enumerate((text or "").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                bad.append(number)
    if bad:
        which = ", ".join(map(str, bad[:_TOLD])) + (", ..." if len(bad) > _TOLD else "")
        lines = f"Line {which}" if len(bad) == 1 else f"{len(bad)} lines ({which})"
        remarks.append(f"{lines} of {path.name} can't be understood, perhaps cut off, and left out.")
    return rows


def _row(line: dict[str, Any]) -> Row:
    row = Row(
        step=int(_number(line["step"])),
        loss=_maybe(line["loss"]),
        lr=_maybe(line.get("lr")),
        grad_norm=_maybe(line.get("grad_norm")),
        tokens=_number(line["tokens"]),
        seconds=_number(line["seconds"]),
        skipped=_number(line.get("skipped", 0)),
        held=_numbers(line.get("held", {})),
        peak=_numbers(line.get("peak", {})),
        budget=_numbers(line.get("budget", {})),
        moved=_numbers(line.get("moved", {})),
        waited=_numbers(line.get("waited", {})),
        compute=_number(line.get("compute", 0)),
        update=_number(line.get("update", 0)),
    )
    if row.seconds <= 0:
        raise ValueError(row.seconds)
    return row


def _records(path: Path, remarks: list[str]) -> list[Record]:
    found = _object(
        path, remarks, "no step was recorded, so there is no timeline (outcore train --trace-steps)"
    )
    if found is None:
        return []
    try:
        return chrome.from_trace(found)
    except UsageError as error:
        remarks.append(f"{path.name} is left out: {error}.")
        return []


def _settings(path: Path, remarks: list[str]) -> dict[str, str]:
    found = _object(path, remarks)
    if found is None:
        return {}
    try:
        settings = {str(name): str(value) for name, value in found["plan"].items()}
        return settings | {"started": str(found["started"]), "outcore": str(found["outcore"])}
    except (KeyError, TypeError, AttributeError):
        remarks.append(f"{path.name} is left out: it is not what outcore writes.")
        return {}


def _plan(path: Path, remarks: list[str]) -> Plan | None:
    found = _object(path, remarks)
    if found is None:
        return None
    try:
        step = found.get("step", {})
        return Plan(
            _numbers(found.get("peak_bytes", {})),
            _maybe(step.get("seconds")),
            str(step.get("bottleneck") or ""),
        )
    except (ValueError, TypeError, AttributeError, OverflowError):
        remarks.append(f"{path.name} is left out: it is not a plan.")
        return None


def _number(value: Any) -> float:
    """Raises: TypeError, ValueError: it is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(value)
    return float(value)


def _maybe(value: Any) -> float | None:
    """A number of either sign; ``None`` for one that is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value) if math.isfinite(value) else None


def _numbers(values: Any) -> dict[str, float]:
    return {str(name): _number(value) for name, value in values.items()}
