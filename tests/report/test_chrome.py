"""Traces: what Perfetto needs, and back again."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from recorded import record

from outcore.errors import UsageError
from outcore.memory.observer import Track
from outcore.report.chrome import from_trace, rows, to_trace
from outcore.report.timeline import Span


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_events_are_as_the_format_wants_them() -> None:
    trace = json.loads(json.dumps(to_trace([record(2), record(3, 11.1)])))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    for event in events(trace, "X"):
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["name"], str)
    threads = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert {e["tid"] for e in events(trace, "X")} == threads.keys()
    assert {"compute", "update", "disk read", "disk write", "device in", "step"} <= set(threads.values())


@pytest.mark.parametrize("track", get_args(Track))
def test_whatever_is_reported_is_in_the_trace(track: Track) -> None:
    made = record(2)
    made = replace(made, spans=(Span(track, "told of", made.start, made.stop),))
    assert "told of" in {event["name"] for event in events(to_trace([made]), "X")}


def test_spans_of_a_thread_never_overlap() -> None:
    """Perfetto nests what overlaps on one thread, and drops what does so only in part."""
    found: dict[int, list[tuple[float, float]]] = {}
    for event in events(to_trace([record(2), record(3, 11.0)]), "X"):
        found.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in found.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(spans))


def test_what_is_written_can_be_read() -> None:
    before = [record(2, 0.0), record(3, 1.1)]
    after = from_trace(json.loads(json.dumps(to_trace(before))))
    assert [r.number for r in after] == [2, 3]
    for old, new in zip(before, after, strict=True):
        assert new.seconds == pytest.approx(old.seconds)
        assert new.budget == old.budget
        assert [(s.track, s.name, s.nbytes) for s in new.spans] == [
            (s.track, s.name, s.nbytes) for s in old.spans
        ]
        assert [s.start for s in new.spans] == pytest.approx([s.start for s in old.spans])


def test_steps_far_apart_are_drawn_near_each_other() -> None:
    first, second, far = from_trace(to_trace([record(2, 100.0), record(3, 101.5), record(900, 7000.0)]))
    assert first.start == 0
    assert second.start == pytest.approx(1.5)
    assert far.start == pytest.approx(2.6)


def test_the_highest_of_a_moment_is_kept() -> None:
    from outcore.report.timeline import Level

    levels = tuple(Level(10.5, "host", "activations", n) for n in (10, 900, 20))
    [found] = from_trace(to_trace([replace(record(), levels=levels)]))
    assert max(level.nbytes for level in found.levels) == 900


def test_rows_are_few_and_in_order() -> None:
    spans = [Span("disk read", "", a, b) for a, b in ((0, 2), (1, 3), (2, 4), (3, 5), (1.5, 1.6))]
    found = rows(spans)
    assert len(found) == 3
    assert all(a.stop <= b.start for row in found for a, b in itertools.pairwise(row))
    assert sum(map(len, found)) == len(spans)


@pytest.mark.parametrize(
    "broken",
    [
        None, [], "x", 7, {}, {"otherData": {}}, {"otherData": {"outcore": 1}},
        {"otherData": {"outcore": 1, "steps": [{"number": 1}]}, "traceEvents": []},
        {"otherData": {"outcore": 1, "steps": 3}, "traceEvents": []},
        {"otherData": {"outcore": 1, "steps": []}, "traceEvents": [3]},
        {"otherData": {"outcore": 2, "steps": []}, "traceEvents": []},
    ],
)  # fmt: skip
def test_what_is_not_a_trace_is_refused(broken: Any) -> None:
    with pytest.raises(UsageError):
        from_trace(broken)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "abc", None, -1.0, 10**400])
@pytest.mark.parametrize("field", ["start", "stop"])
def test_times_that_are_none_are_refused(field: str, value: Any) -> None:
    trace = to_trace([record()])
    trace["otherData"]["steps"][0][field] = value
    if field == "start" and value == -1.0:
        assert from_trace(trace)
    else:
        with pytest.raises(UsageError):
            from_trace(trace)
