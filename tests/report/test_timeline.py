"""What is recorded of a step: complete, in order, bounded, and without a change of what is computed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from recorded import UNITS, offloaded, step

import outcore
from outcore.errors import StateError, TierError
from outcore.memory.ledger import Ledger
from outcore.offloaded import engine_of
from outcore.report.shares import busy, fillings, uses
from outcore.report.timeline import Level, Record, Span, Timeline
from outcore.report.traced import parse_steps
from outcore.report.tracer import timeline_of

CPU = torch.device("cpu")


def ticking(ledger: Ledger, limit: int = 1000) -> Timeline:
    """A timeline whose clock goes on by a second whenever it is read."""
    seconds = count()
    return Timeline(ledger, CPU, clock=lambda: float(next(seconds)), limit=limit)


# -- the seam -----------------------------------------------------------------------------------------


def test_what_the_ledger_hears_is_recorded() -> None:
    ledger = Ledger(budget={"host": 100})
    ledger.hold("host", 7, "parameters")
    timeline = ticking(ledger)  # second 0
    with timeline.step(4):  # begins at 1; the level is told at 2
        with ledger.waiting("disk read"):  # 3 to 4
            pass
        with ledger.doing("update", "a"):  # 5 to 6
            ledger.hold("host", 5, "gradients")  # told at 6, so the update ends at 7
    [record] = timeline.records
    assert (record.number, record.start, record.budget, record.dropped) == (4, 1.0, {"host": 100}, 0)
    assert record.spans == (Span("waiting", "disk read", 3.0, 4.0), Span("update", "a", 5.0, 7.0))
    assert record.levels == (Level(2.0, "host", "parameters", 7), Level(6.0, "host", "gradients", 5))


def test_a_moment_above_what_is_held_is_seen() -> None:
    ledger, seen = Ledger(budget={"host": 100}), []
    timeline = ticking(ledger)
    with timeline.step(1):
        ledger.hold("host", 10, "activations")
        ledger.touch_peak("host", 30, "activations")
        seen = [level.nbytes for level in timeline._raw.levels]  # type: ignore[union-attr]
    assert seen == [10, 40, 10]
    [filling] = fillings(timeline.records[0], 100)
    assert filling.peak.total == ledger.peak("host") == 40


def test_nobody_looks_on_unless_asked() -> None:
    ledger = Ledger()
    assert ledger.mark() is None
    with ledger.doing("update", "a"), ledger.waiting("disk read"):
        ledger.hold("host", 1)
    timeline = ticking(ledger)
    with timeline.step(1):
        pass
    assert ledger.mark() is None
    ledger.hold("host", 1)
    assert timeline.records[0].spans == ()


def test_memory_is_bounded_and_what_is_left_out_is_counted() -> None:
    ledger = Ledger()
    timeline = ticking(ledger, limit=10)
    with timeline.step(1):
        for _ in range(25):
            with ledger.doing("update", "a"):
                ledger.hold("host", 1)
    [record] = timeline.records
    assert (len(record.spans), len(record.levels), record.dropped) == (10, 10, 30)


def test_many_threads_may_report_at_once() -> None:
    ledger = Ledger()
    timeline = Timeline(ledger, CPU)

    def report() -> None:
        for _ in range(500):
            with ledger.doing("update", "a"):
                ledger.hold("host", 1)

    with timeline.step(1):
        threads = [threading.Thread(target=report) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [record] = timeline.records
    assert len(record.spans) == len(record.levels) == 2000
    assert record.levels[-1].nbytes == 2000
    assert all(a.at <= b.at for a, b in zip(record.levels, record.levels[1:], strict=False))


def test_a_step_that_fails_leaves_no_record() -> None:
    ledger = Ledger()
    timeline = ticking(ledger)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), timeline.step(1):
        fail()
    assert timeline.records == []
    assert ledger.mark() is None
    with timeline.step(2):
        pass
    assert [record.number for record in timeline.records] == [2]


def test_a_step_within_a_step_is_refused() -> None:
    timeline = ticking(Ledger())
    with timeline.step(1), pytest.raises(StateError), timeline.step(2):
        pass


# -- a real run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[float], Record, dict[str, int]]]:
    """Losses of four steps, the record of the third, and the bytes that it moved."""
    model, optimizer = offloaded(tmp_path_factory.mktemp("disk"))
    timeline = timeline_of(model)
    losses = [step(model, optimizer, 0), step(model, optimizer, 1)]
    engine_of(model).pool.quiesce()
    before = outcore.snapshot(model)
    with timeline.step(3):
        losses.append(step(model, optimizer, 2))
    after = outcore.snapshot(model)
    losses.append(step(model, optimizer, 3))
    yield losses, timeline.records[0], {k: n - before.moved[k] for k, n in after.moved.items()}
    outcore.release(model)


def test_recording_changes_no_bit(run: tuple[list[float], Record, dict[str, int]], tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path, host="1GiB")
    assert [step(model, optimizer, k) for k in range(4)] == run[0]
    outcore.release(model)


def test_each_unit_runs_forward_and_backward_once(run: tuple[list[float], Record, dict[str, int]]) -> None:
    record = run[1]
    for track in ("forward", "backward"):
        assert Counter(s.name for s in record.spans if s.track == track) == Counter(UNITS)
    forward = [s for s in record.spans if s.track == "forward"]
    assert [s.name for s in forward] == ["first", *(f"blocks.{k}" for k in range(5)), "last"]
    assert all(a.stop <= b.start for a, b in pairwise(forward))


def test_each_chunk_is_updated_once_between_backward_and_its_next_forward(
    run: tuple[list[float], Record, dict[str, int]],
) -> None:
    """Those of the step before come with this step's forward, those of this one may be done already."""
    updates = [s for s in run[1].spans if s.track == "update"]
    forward = {s.name: s for s in run[1].spans if s.track == "forward"}
    after = max(s.stop for s in run[1].spans if s.track == "backward")
    assert {s.name.split(" ")[0] for s in updates} == UNITS
    early = [s for s in updates if s.stop <= forward[s.name.split(" ")[0]].start]
    late = [s for s in updates if s.start >= after]
    assert len(early) + len(late) == len(updates)
    for found in (early, late):
        assert all(count == 1 for count in Counter(s.name for s in found).values())


def test_every_byte_of_the_disk_is_in_a_span(run: tuple[list[float], Record, dict[str, int]]) -> None:
    _, record, moved = run
    assert moved["disk read"] > 0
    for link in ("disk read", "disk write"):
        assert sum(s.nbytes for s in record.spans if s.track == link) == moved[link]
    found = uses(record)
    assert 0 < found["disk read"].nbytes <= moved["disk read"]
    assert all(s.name for s in record.spans)


def test_levels_add_up_and_stay_under_the_budget(run: tuple[list[float], Record, dict[str, int]]) -> None:
    [host, disk] = fillings(run[1], 10_000)
    assert host.budget == 4 << 20
    assert 0.8 * host.budget < host.peak.total <= host.budget
    assert {"parameters", "gradients", "optimizer states", "activations"} <= set(host.kinds)
    assert disk.peak.total > 0


def test_time_is_not_lost(run: tuple[list[float], Record, dict[str, int]]) -> None:
    record = run[1]
    assert all(record.start <= s.start <= s.stop for s in record.spans)
    on_thread = [s for s in record.spans if s.track in ("forward", "backward", "update", "waiting")]
    assert busy(on_thread, record.start, record.stop) <= record.seconds


def test_a_profiler_sees_units_by_name(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path, prefetch=False)  # it sees the training thread alone
    step(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, optimizer)
    names = {event.key for event in profile.key_averages()}
    for unit in UNITS:
        assert {f"outcore: forward {unit}", f"outcore: backward {unit}"} <= names
    assert any(name.startswith("outcore: update blocks.0") for name in names)
    outcore.release(model)


# -- record() and the steps to take -------------------------------------------------------------------


def test_a_block_of_the_users_is_recorded(tmp_path: Path) -> None:
    import json

    model, optimizer = offloaded(tmp_path)
    step(model, optimizer)
    path = tmp_path / "new" / "trace.json"
    with outcore.record(model, path):
        step(model, optimizer)
    events = json.loads(path.read_text())["traceEvents"]
    assert {"forward", "backward", "update", "disk read"} <= {event.get("cat") for event in events}
    with pytest.raises(TierError, match="can't be written"), outcore.record(model, tmp_path):
        pass
    with outcore.record(model, path), pytest.raises(StateError), outcore.record(model, path):
        pass
    outcore.release(model)
    with pytest.raises(StateError), outcore.record(model, path):
        pass


@pytest.mark.parametrize(
    ("text", "steps", "found"),
    [
        ("2-3,last", 40, {2, 3, 40}),
        ("2-3,last", 1, {1}),
        ("2-3,last", 2, {2}),
        ("none", 9, set()),
        (" 1, 4 - 5 ", 9, {1, 4, 5}),
        ("7-900000000000", 9, {7, 8, 9}),
        ("Last", 9, {9}),
    ],
)
def test_steps_are_understood(text: str, steps: int, found: set[int]) -> None:
    assert parse_steps(text, steps) == found


@pytest.mark.parametrize(
    "text", ["", "0", "3-2", "-1", "1,,2", "first", "1-", "none,1", "1.5", "٣x", "1" * 40]
)
def test_steps_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(outcore.errors.UsageError, match="--trace-steps"):
        parse_steps(text, 9)
