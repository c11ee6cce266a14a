"""Recorded steps as a Chrome trace, which Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open, and back.

The file is an object of the `Trace Event Format`_: times in microseconds, one thread per resource, spans as
complete events (``X``), bytes per tier as counters (``C``). Spans of one resource that overlap, such as reads
under way at once, lie on further threads of the same name. Steps that were not taken one after the other are
drawn closer together than they were. ``otherData`` says what the events alone don't: the steps, the budgets,
what was dropped.

.. _Trace Event Format:
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from outcore.errors import UsageError
from outcore.memory.observer import TRACKS
from outcore.report.timeline import Level, Record, Span

NAME = "trace.json"
VERSION = 1
GAP = 0.1
"""Between steps that were not neighbours, as a share of the step before."""

_THREADS = {
    "step": "step",
    "forward": "compute",
    "backward": "compute",
    "read": "compute",
    "update": "update",
    "waiting": "waiting (training thread)",
    "device waiting": "waiting (compute stream)",
}
"""The thread that shows a track, where it is not named alike."""


def thread_of(track: str) -> str:
    """The name of the thread, or row, on which a track is shown."""
    return _THREADS.get(track, track)


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans over as few rows as keep those of a row apart, each in the first row that has room."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        for row in found:
            if row[-1].stop <= span.start:
                row.append(span)
                break
        else:
            found.append([span])
    return found


# -- writing ------------------------------------------------------------------------------------------


def to_trace(records: Sequence[Record]) -> dict[str, Any]:
    """All steps as one object for `json.dump`."""
    events: list[dict[str, Any]] = [_meta("process_name", 0, "outcore")]
    steps: list[dict[str, Any]] = []
    named: dict[str, int] = {}
    shifts = _shifts(records)
    for record, shift in zip(records, shifts, strict=True):
        own = Span("step", f"step {record.number}", record.start, record.stop)
        for order, thread in enumerate(dict.fromkeys(map(thread_of, TRACKS))):
            spans = (span for span in (own, *record.spans) if thread_of(span.track) == thread)
            for row, members in enumerate(rows(spans)):
                tid = named.setdefault(f"{thread} {row}", 100 * order + row)
                for span in members:
                    events.append(_complete(span, record.number, shift, tid))
        events += _counters(record, shift)
        steps.append(
            {
                "number": record.number,
                "start": _micro(record.start + shift),
                "stop": _micro(record.stop + shift),
                "dropped": record.dropped,
                "exact": record.exact,
                "budget": dict(record.budget),
            }
        )
    for name, tid in named.items():
        events.append(_meta("thread_name", tid, name.rsplit(" ", 1)[0]))
        events.append({**_meta("thread_sort_index", tid, ""), "args": {"sort_index": tid}})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"outcore": VERSION, "steps": steps},
    }


def _shifts(records: Sequence[Record]) -> list[float]:
    """Seconds by which each step is moved: none within neighbours, and gaps between others shortened."""
    shifts: list[float] = []
    for before, record in zip((None, *records), records, strict=False):
        if before is None:
            shifts.append(-record.start)
        elif record.number == before.number + 1:
            shifts.append(shifts[-1])
        else:
            shifts.append(before.stop + shifts[-1] + GAP * before.seconds - record.start)
    return shifts


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _meta(name: str, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": tid, "name": name, "args": {"name": value}}


def _complete(span: Span, step: int, shift: float, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": step}
    if span.nbytes:
        args["bytes"] = span.nbytes
        if span.seconds > 0:
            args["GB/s"] = round(span.nbytes / span.seconds / 1e9, 3)
    return {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "ts": _micro(span.start + shift),
        "dur": _micro(max(0.0, span.seconds)),
        "cat": span.track,
        "name": span.name,
        "args": args,
    }


def _counters(record: Record, shift: float) -> list[dict[str, Any]]:
    """Bytes per tier by kind at each change; what comes within a microsecond is one."""
    held: dict[str, dict[str, int]] = {}
    found: dict[tuple[str, float], dict[str, Any]] = {}
    peaks: dict[tuple[str, float], int] = {}
    for level in record.levels:
        kinds = held.setdefault(level.tier, {})
        kinds[level.kind] = level.nbytes
        key = level.tier, _micro(max(record.start, level.at) + shift)
        if sum(kinds.values()) >= peaks.get(key, 0):  # of those at one time the highest counts
            peaks[key] = sum(kinds.values())
            found[key] = {
                "ph": "C",
                "pid": 1,
                "ts": key[1],
                "name": f"{level.tier} bytes",
                "cat": level.tier,
                "args": dict(kinds),
            }
    return list(found.values())


# -- reading ------------------------------------------------------------------------------------------


def from_trace(trace: Any) -> list[Record]:
    """The steps of an object that `to_trace` made.

    Raises:
        UsageError: it is not one.
    """
    try:
        if trace["otherData"]["outcore"] != VERSION:
            raise UsageError("it is of another version of outcore")
        spans: dict[int, list[Span]] = {}
        levels: list[Level] = []
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and event["cat"] != "step":
                spans.setdefault(int(event["args"]["step"]), []).append(_span(event))
            elif event["ph"] == "C":
                at = _seconds(event["ts"])
                levels += (Level(at, str(event["cat"]), str(k), int(n)) for k, n in event["args"].items())
        levels.sort(key=lambda level: level.at)
        return [_record(step, spans, levels) for step in trace["otherData"]["steps"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UsageError("it is not a trace that outcore wrote") from None


def _span(event: dict[str, Any]) -> Span:
    start = _seconds(event["ts"])
    nbytes = int(event["args"].get("bytes", 0))
    return Span(str(event["cat"]), str(event["name"]), start, start + _seconds(event["dur"]), nbytes)


def _record(step: dict[str, Any], spans: dict[int, list[Span]], levels: list[Level]) -> Record:
    number, start, stop = int(step["number"]), _seconds(step["start"]), _seconds(step["stop"])
    if not stop > start:
        raise ValueError(number)
    first = bisect_left(levels, start, key=lambda level: level.at)
    last = bisect_right(levels, stop, key=lambda level: level.at)
    return Record(
        number,
        start,
        stop,
        tuple(sorted(spans.get(number, ()), key=lambda span: span.start)),
        tuple(levels[first:last]),
        {str(tier): int(nbytes) for tier, nbytes in step["budget"].items()},
        int(step["dropped"]),
        bool(step["exact"]),
    )


def _seconds(micro: Any) -> float:
    seconds = float(micro) / 1e6
    if not math.isfinite(seconds):
        raise ValueError
    return seconds
