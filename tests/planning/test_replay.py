"""Spans that are run instead of rated: what is on a tape, what running it does, and what is kept of it."""

from __future__ import annotations

import gc
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import outcore
from exact.families import FAMILIES
from outcore.errors import UsageError
from outcore.memory.device import Offers, free_bytes
from outcore.memory.heap import USUAL, Rule
from outcore.planning.recorder import Span
from outcore.planning.replay import HOST, Replayed, replay
from outcore.planning.subject import Subject
from outcore.planning.tape import Ran, Recording, Stretched, Tape
from outcore.planning.this import Here
from outcore.planning.timebook import Timebook
from outcore.planning.timing import Rates, Replays, work_of
from outcore.planning.work import Work
from planning.accuracy import CPU, Case, predict

GPT2 = next(shape for shape in FAMILIES if shape.name == "gpt2")
ACTIVATIONS = [
    outcore.Activations("keep"),
    outcore.Activations("recompute"),
    outcore.Activations("recompute", 1),
]


def spans(activations: outcore.Activations, taped: bool = True) -> list[Span]:
    model = GPT2.build()
    subject = Subject(model, outcore.AdamW(model.parameters()), GPT2.batch(0))
    subject.taped = taped
    return subject.trace(subject.batch_size, activations).spans


def tapes(found: list[Span]) -> list[Tape]:
    return [span.tape for span in found if isinstance(span.tape, Tape) and span.tape.events]


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.planning.replay.SPAN", 0.0)  # the least rounds


class Counted:
    """A clock that moves on by one with each look."""

    def __init__(self) -> None:
        self.looks = itertools.count()

    def __call__(self) -> float:
        return float(next(self.looks))


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
def test_a_tape_has_the_operators_that_were_counted_and_runs(activations: outcore.Activations) -> None:
    found = spans(activations)
    free = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
    ran = [e for tape in tapes(found) for e in tape.events if isinstance(e, Ran)]
    counted = sum(span.work.operators for span in found)
    asked = 1  # whether a mask hides something: what is told to a model that asks isn't run
    assert sum(not e.func.is_view and e.func not in free for e in ran) == counted - asked
    state = torch.get_rng_state()
    for tape in tapes(found):
        assert replay(tape, Counted()) == Replayed(
            1.0, []
        )  # from the look before a round to the one after it
    assert torch.equal(torch.get_rng_state(), state)


class Living(Counted):
    """Notes at each look how many tensors there are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __call__(self) -> float:
        self.found.append(sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()))
        return super().__call__()


def test_what_a_round_leaves_stays_through_the_next_where_a_step_gives_its_pages_back() -> None:
    forward = (s.tape for s in spans(outcore.Activations("keep")) if s.event[0] == "forward")
    tape = max((t for t in forward if isinstance(t, Tape)), key=lambda tape: len(tape.events))
    begun = {}
    for rule in (USUAL, Rule(0, -1)):
        living = Living()
        replay(tape, living, rule=rule)
        starts = living.found[2::2]  # of the rounds that count
        assert len(starts) >= 2
        assert starts[-1] == starts[0]
        begun[rule] = starts[0] - living.found[0]
    assert begun[USUAL] > 0
    assert begun[Rule(0, -1)] == 0


def test_blocks_that_are_alike_have_the_same_tape_and_others_do_not() -> None:
    found = spans(outcore.Activations("recompute"))
    forward = {s.event[1]: s.tape for s in found if s.event[0] == "forward" and isinstance(s.tape, Tape)}
    signatures = [tape.signature for tape in forward.values() if tape.events]
    assert len(signatures) > len(set(signatures)) > 1


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert not tapes(spans(outcore.Activations("keep"), taped=False))


def test_running_a_tape_computes_what_was_traced() -> None:
    tape, recording = Tape(), Recording()
    x = torch.zeros(4, 6)
    view = x.t()
    recording.ran(tape, torch.ops.aten.t.default, (x,), {}, view)
    y = torch.mm(x, view)
    recording.ran(tape, torch.ops.aten.mm.default, (x, view), {}, y)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a, b))
        return a @ b

    tape.events[1] = tape.events[1]._replace(func=spy)  # type: ignore[union-attr]
    replay(tape, Counted())
    assert len(seen) >= 2  # one round warms up
    for a, b in seen:
        assert a.shape == (4, 6)
        assert b.shape == (6, 4)
        assert a.data_ptr() == b.data_ptr()  # a view stays one
        assert a.abs().sum() > 0


def test_what_died_is_given_up_at_its_place_and_addresses_that_come_again_are_others() -> None:
    tape, recording = Tape(), Recording()
    x = torch.zeros(2)
    recording.ran(tape, torch.ops.aten.neg.default, (x,), {}, x)
    recording.died(tape, x.untyped_storage()._cdata)
    recording.ran(tape, torch.ops.aten.neg.default, (x,), {}, x)
    recording.died(tape, 12345)  # never seen
    numbers = [e.args[0].storage if isinstance(e, Ran) else e.storage for e in tape.events]
    assert numbers == [0, 0, 1]
    assert [ref.storage for ref in tape.outside()] == [0, 1]


def test_more_slices_take_what_the_last_one_added() -> None:
    short, long = Tape(), Tape()
    seconds = {short: 2.0, long: 3.0}
    for tape in seconds:
        tape.events.append(Ran(None, (), {}, None))
    assert Stretched(short, long, 4).seconds(seconds.__getitem__) == 7.0
    seconds[long] = 1.5  # noise must not make a longer one shorter than what was measured
    assert Stretched(short, long, 4).seconds(seconds.__getitem__) == 1.5


def linear_span() -> Span:
    tape = Tape()
    x = torch.zeros(8, 8)
    Recording().ran(tape, torch.ops.aten.mm.default, (x, x), {}, torch.zeros(8, 8))
    return Span(("forward", 0), work=Work({"fp32": 10**9}), tape=tape)


def test_what_cannot_be_run_is_rated() -> None:
    rated = Rates(CPU)
    span = linear_span()
    assert Replays(CPU, Timebook(), Counted()).seconds(span) == 1.0

    assert isinstance(span.tape, Tape)
    ran = span.tape.events[0]

    def broken(*args: object) -> object:
        raise RuntimeError("an index is out of range")

    broken_tape = Tape([ran._replace(func=broken)])  # type: ignore[union-attr]
    assert Replays(CPU, Timebook(), Counted()).seconds(replace(span, tape=broken_tape)) == rated.seconds(span)
    small = replace(CPU, host=8 * 100)
    assert Replays(small, Timebook(), Counted()).seconds(span) == rated.seconds(span)
    long = replace(span, work=Work({"bf16": 10**15}))
    assert Replays(CPU, Timebook(), Counted()).seconds(long) == rated.seconds(long)


def test_a_time_is_in_the_middle_of_two_rounds_at_least() -> None:
    """After one that isn't counted, however long they take."""
    clock = Counted()
    span = linear_span()
    assert isinstance(span.tape, Tape)
    replay(span.tape, clock)
    assert next(clock.looks) == 2 * 3


def test_spans_are_run_under_the_heap_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept apart from those of another: the rule is that of `outcore.model.sites`."""
    applied: list[Rule] = []
    monkeypatch.setattr(Rule, "apply", lambda rule: applied.append(rule))
    book, span = Timebook(), linear_span()
    timing = Replays(CPU, book, Counted())
    rules = [Rule.of(host, roomy) for host, roomy in ((64 << 20, False), (4 << 30, False), (4 << 30, True))]
    assert len(set(rules)) == 3
    for host, roomy in ((64 << 20, False), (4 << 30, False), (4 << 30, True)):
        with timing.within(host, roomy):
            timing.seconds(span)
    assert applied == [rule for own in rules for rule in (own, USUAL)]
    assert len(book._found) == 3


def test_times_are_kept_until_the_machine_is_profiled_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "spans.json"
    Timebook(path, "monday").put("a", 0.5)
    assert Timebook(path, "monday").get("a") == 0.5
    assert Timebook(path, "tuesday").get("a") is None
    assert [p.name for p in path.parent.iterdir()] == ["spans.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"under": 1}', '{"under": "x", "seconds": []}', "\x00"])
def test_a_file_that_makes_no_sense_is_begun_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spans.json"
    path.write_text(text)
    book = Timebook(path, "monday")
    assert book.get("a") is None
    book.put("a", 0.25)
    assert Timebook(path, "monday").get("a") == 0.25


def test_times_that_are_none_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    book = Timebook(path)
    book.put("a", 0.5)
    table = json.loads(path.read_text())
    table["seconds"] |= {"b": -1, "c": float("inf")}
    path.write_text(json.dumps(table))
    assert [Timebook(path).get(name) for name in "abc"] == [0.5, None, None]


def test_where_nothing_can_be_written_times_are_only_not_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    book = Timebook(tmp_path / "file" / "spans.json")
    book.put("a", 0.5)
    assert book.get("a") == 0.5


def test_a_plan_for_the_machine_at_hand_runs_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = Case(GPT2.build, GPT2.batch(0), roomy=True)
    limits = case.limits(case.subject())
    slow = replace(CPU, flops={"bf16": 1e6}, host=64 << 30)  # by rates a step takes minutes
    rated = predict(case, limits, slow)
    calls = itertools.count(1)
    monkeypatch.setattr(
        "outcore.planning.timing.replay", lambda *arguments, rule: Replayed(1e-3 * next(calls))
    )
    monkeypatch.setattr("outcore.planning.timing.LONGEST", 1e9)
    run = predict(case, limits, Here.of(slow, HOST))
    assert 0 < run.compute < rated.compute / 10
    count = next(calls)
    assert (tmp_path / "outcore" / "spans.json").is_file()
    assert predict(case, limits, Here.of(slow, HOST)).compute == run.compute
    assert next(calls) == count + 1  # all of it was known


@pytest.mark.emulated
def test_on_an_accelerator_spans_run_there(monkeypatch: pytest.MonkeyPatch, emu: ModuleType) -> None:
    there = Here.of(replace(CPU, device=1 << 30, link_in=1e9, link_out=1e9), torch.device("emu", 0))
    assert isinstance(there.timing(), Replays)
    found = tapes(spans(outcore.Activations("recompute")))
    before, drawn = free_bytes(torch.device("emu")), torch.emu.get_rng_state()
    for tape in found:
        seen: set[str] = set()

        def spy(*args: Any, ran: Any, seen: set[str] = seen, **kwargs: Any) -> Any:
            seen.update(leaf.device.type for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "device"))
            return ran(*args, **kwargs)

        watched = [
            e._replace(func=partial(spy, ran=e.func)) if isinstance(e, Ran) else e for e in tape.events
        ]
        assert replay(Tape(watched), Counted(), torch.device("emu")) == Replayed(1.0, [])
        assert seen <= {"emu"}
    assert torch.equal(drawn, torch.emu.get_rng_state())
    assert free_bytes(torch.device("emu")) == before


def test_what_a_device_lacks_is_rated_and_the_rest_runs() -> None:
    tape, recording = Tape(), Recording()
    x, y = torch.zeros(64, 64), torch.zeros(64, 64)

    def lacking(*args: object) -> object:
        raise NotImplementedError("no kernel")

    recording.ran(tape, torch.ops.aten.mm.default, (x, x), {}, y)
    tape.events[0] = tape.events[0]._replace(func=lacking)  # type: ignore[union-attr]
    recording.ran(tape, torch.ops.aten.neg.default, (y,), {}, torch.zeros(64, 64))
    found = replay(tape, Counted())
    assert found.seconds == 1.0
    assert found.lacking == [tape.events[0]]
    missing = Ran(torch.ops.aten.mm.default, *tape.events[0][1:])  # type: ignore[misc]
    work = work_of([missing])
    assert work.flops == {"fp32": 2 * 64**3}
    assert work.operands == 3 * x.nbytes


def test_where_operators_are_only_noted_down_they_are_rated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.planning.this.offers", lambda device: Offers(False, False, False))
    there = Here.of(replace(CPU, device=1 << 30, link_in=1e9, link_out=1e9), torch.device("xla", 0))
    assert isinstance(there.timing(), Rates)
    assert there.sized(host=1 << 30).host == 1 << 30
    with pytest.raises(UsageError):
        Here.of(CPU, HOST).sized(device=1)


def test_a_module_with_buffers_that_it_writes_can_be_run() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4 * 6, 2)).train()
    batch, precision = {"input": torch.zeros(5, 3, 8)}, outcore.Precision("fp32")
    subject = Subject(model, outcore.AdamW(model.parameters()), batch, precision=precision)
    subject.taped = True
    found = subject.trace(5, outcore.Activations("keep")).spans
    assert all(replay(tape, Counted()) == Replayed(1.0, []) for tape in tapes(found))
