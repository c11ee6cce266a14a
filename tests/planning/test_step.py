"""The simulated step: updates under the next forward, who shares cores with whom, and slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.families import FAMILIES
from outcore.chunks.chunk import Residence
from outcore.chunks.guards import Access
from outcore.planning.cache import Cache
from outcore.planning.flow import Piece, Traffic
from outcore.planning.minimum import needs
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.passage import Passage
from outcore.planning.planner import Planner
from outcore.planning.settings import CHUNK_SIZES, Settings
from outcore.planning.subject import Subject
from outcore.planning.updates import Job, Updater
from outcore.trace.schedule import Schedule
from planning.accuracy import CPU, EMU, Case, measure, off, predict

LLAMA = FAMILIES[1]
ROOMY = Limits(None, 1 << 30, 1 << 30)


def simulated(machine: Any, limits: Limits, **settings: Any) -> Outcome:
    model = LLAMA.build().train()
    subject = Subject(model, outcore.AdamW(model.parameters()), LLAMA.batch(0))
    asked = {"micro_batch": 2, "accumulate": 1, "activations": outcore.Activations(), "chunk_bytes": 1 << 17}
    return Planner(subject, machine, limits).simulate(Settings(**{**asked, **settings}))


def test_updates_hide_behind_an_accelerator() -> None:
    limits = replace(ROOMY, device=1 << 30)
    plain = simulated(EMU, limits)
    slow = replace(EMU, update=EMU.update * plain.update / plain.compute * 4)
    found = simulated(slow, limits)
    assert found.update == pytest.approx(found.compute / 4, rel=0.01)
    added = found.update - plain.update
    assert (
        0 < found.seconds - plain.seconds < 0.7 * added
    )  # that of the unit that is used first is waited for


@pytest.mark.parametrize(("both", "least", "most"), [(1.0, 0.99, 1.01), (2.0, 0.0, 0.5)])
def test_on_a_cpu_updates_take_what_computing_loses(both: float, least: float, most: float) -> None:
    """All of it, or nothing but what is done before the first unit is used."""
    plain = simulated(CPU, ROOMY)
    machine = replace(CPU, both=both, update=CPU.update * plain.update / plain.compute * 4)
    found = simulated(machine, ROOMY)
    assert found.update == pytest.approx(found.compute / 4, rel=0.01)
    assert least * found.update <= found.seconds - found.compute <= most * found.update


def test_a_busy_disk_slows_computing_where_it_shares_its_cores() -> None:
    tight = Limits(
        None, 5 << 20, 1 << 30
    )  # with less the disk is what a step waits for, however slowly it computes
    free = simulated(CPU, tight)
    held = simulated(replace(CPU, io_turn=1e-4, io_rate=CPU.disk_read), tight)
    for link, nbytes in free.moved.items():
        assert held.moved[link] == pytest.approx(nbytes, rel=0.1)
    most = sum(held.moved.values()) / CPU.disk_read + 1e-4 * sum(held.moved.values()) / 4096
    assert free.seconds < held.seconds < free.seconds + most


def test_updates_of_small_parameters_take_longer_than_their_bytes() -> None:
    plain = simulated(CPU, ROOMY)
    found = simulated(replace(CPU, update_turn=1e-3), ROOMY)
    parts = sum(parameter.requires_grad for parameter in LLAMA.build().parameters())
    assert found.update - plain.update >= 1e-3 * parts  # more where a parameter lies in several chunks
    assert found.seconds - plain.seconds == pytest.approx(found.update - plain.update, rel=0.01)


def test_without_room_beside_a_forward_updates_are_done_in_the_step() -> None:
    """Where activations leave less than two updates, as `Engine.apply` has it; with more, some hide under a forward."""
    model = LLAMA.build().train()
    batch = {name: torch.cat([value] * 16) for name, value in LLAMA.batch(0).items()}
    subject = Subject(model, outcore.AdamW(model.parameters()), batch)
    settings = Settings(32, 1, outcore.Activations(), 1 << 16)
    units, points = subject.layout(settings.chunk_bytes)
    growth = subject.trace(32, settings.activations).growth
    update = needs(units, points, False).update
    machine = replace(CPU, both=2.0)
    for share, hides in ((19, False), (40, True)):
        limits = Limits(None, growth + share * update // 10, 1 << 30)
        simulation = Planner(subject, machine, limits).simulation(settings)
        assert simulation.updates_at_once is not hides


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_takes_too_long_is_given_up(accumulate: int) -> None:
    model = LLAMA.build().train()
    planner = Planner(
        Subject(model, outcore.AdamW(model.parameters()), LLAMA.batch(0)),
        CPU,
        Limits(None, 3 << 20, 1 << 30),
    )
    settings = Settings(2 // accumulate, accumulate, outcore.Activations(), 1 << 17)
    found = planner.fits(settings)
    assert found is not None
    assert planner.fits(settings, 1.05 * found.seconds) == found
    assert planner.fits(settings, 0.5 * found.seconds) is None


def test_sizes_of_chunks_that_move_in_the_same_pieces_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build().train()
    planner = Planner(Subject(model, outcore.AdamW(model.parameters()), LLAMA.batch(0)), CPU, ROOMY)
    asked = [outcore.Activations()]
    planner.best(2, 1, 2, asked, None, None, 1)  # pieces as large as chunks
    assert planner.tried == len(CHUNK_SIZES)
    for module in (outcore.planning.planner, outcore.planning.settings):
        monkeypatch.setattr(module, "CHUNK_SIZES", (1 << 14, 1 << 15))
    monkeypatch.setattr(outcore.planning.planner, "PIECES", 1)
    planner.tried = 0
    planner.best(2, 1, 2, asked, None, None, 1)
    assert planner.tried == 1


class WithSpare(nn.Module):
    """The last module is trained, and never called: its gradient never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(input))).sum()


@pytest.mark.parametrize("host", [120 << 10, 1 << 30], ids=["tight", "roomy"])
def test_a_module_that_is_never_called_is_planned(host: int) -> None:
    model = WithSpare()
    subject = Subject(model, outcore.AdamW(model.parameters()), {"input": torch.randn(4, 64)})
    found = Planner(subject, CPU, Limits(None, host, 1 << 30)).simulate(
        Settings(4, 1, outcore.Activations(), 1 << 14)
    )
    assert found.seconds > 0
    assert found.peak["host"] <= host


def updater(budget: int, ticks: list[list[Piece]]) -> tuple[Cache, Updater, Schedule]:
    """A pool whose laps are of these ticks, numbered from 0: one is on record, and the next begins."""
    cache = Cache(budget, 1 << 20, Traffic(100.0, 100.0))
    cache.beside = Updater(cache, 2.0)
    cache.schedule.begin("lap")
    for number, tick in enumerate(ticks):
        cache.schedule.advance(number, tick)
    cache.schedule.begin("lap")
    return cache, cache.beside, cache.schedule


def emptied(cache: Cache) -> None:
    """Nothing idle stays."""
    cache.hold_idle(False)
    cache.hold_idle(True)


def test_the_thread_takes_room_only_from_what_is_needed_later() -> None:
    gradient, state, soon = (Piece(100) for _ in range(3))
    cache, thread, _ = updater(250, [[soon], [gradient, state]])
    for piece in (state, gradient, soon):
        cache.bring((piece,), Access.FRESH)
        cache.release((piece,))
    assert state.residence is not Residence.DIRTY  # it had to leave for the others
    cache.wait_until(10.0)
    thread.begin([Job(gradient, (state,), 1, 5.0)])
    cache.wait_until(20.0)
    assert soon.on_host  # needed sooner than the update: it stays, and the update waits
    assert not thread.busy


def test_an_update_done_ahead_is_not_foreseen_any_more() -> None:
    gradient, state, other = (Piece(100) for _ in range(3))
    cache, thread, schedule = updater(400, [[other], [gradient, state]])
    for piece in (gradient, state):
        cache.bring((piece,), Access.FRESH)
        cache.release((piece,))
    cache.tick(0, [other])
    assert schedule.next_use(state) == 1
    job = Job(gradient, (state,), 1, 5.0)
    thread.begin([job])
    assert thread.busy
    cache.work(6.0, shared=True)
    assert not thread.busy
    assert thread.seconds == 5.0
    assert gradient.residence is Residence.EMPTY
    assert schedule.next_use(state) == 3  # in the next step
    thread.settle([job])
    assert cache.now == 6.0


def test_the_training_thread_does_what_the_other_has_not_begun_and_waits_for_the_rest() -> None:
    pieces = [Piece(10) for _ in range(4)]
    cache, thread, _ = updater(1000, [pieces[:2], pieces[2:]])
    cache.bring(pieces, Access.FRESH)
    cache.release(pieces)
    jobs = [Job(pieces[0], (pieces[1],), 0, 4.0), Job(pieces[2], (pieces[3],), 1, 4.0)]
    thread.begin(jobs)
    thread.settle(jobs)  # the thread has begun the first; two updates share the cores
    assert cache.now == pytest.approx(8.0)
    assert thread.seconds == 8.0


def test_no_more_than_a_quarter_is_read_ahead_but_for_the_next_two_ticks() -> None:
    pieces = [Piece(100) for _ in range(6)]
    cache, _, _ = updater(800, [[piece] for piece in pieces])
    for piece in pieces:
        cache.bring((piece,), Access.FRESH)
        cache.release((piece,))
    emptied(cache)
    cache.tick(0, pieces[:1])
    assert [p.on_host for p in pieces] == [False, True, True, False, False, False]
    cache.wait_until(100.0)
    small = [Piece(100) for _ in range(6)]
    cache, _, _ = updater(800, [[small[0]], [small[1], small[2]], [small[3]], [small[4]], [small[5]]])
    for piece in small:
        cache.bring((piece,), Access.FRESH)
        cache.release((piece,))
    emptied(cache)
    cache.tick(0, small[:1])
    assert [p.on_host for p in small] == [False, True, True, True, False, False]


def test_each_transfer_takes_its_turn_and_computing_slows_the_disk_as_the_disk_slows_computing() -> None:
    first = Piece(100)
    traffic = Traffic(100.0, 100.0, turn=1.0, io_turn=1.0, io_rate=33.333333333333336, slowed=0.25)
    cache = Cache(400, 1 << 20, traffic)
    cache.bring((first,), Access.FRESH)
    cache.release((first,))
    emptied(cache)
    assert cache.now == 2.0  # 1 s for its bytes
    assert cache.enter((first,))
    assert first.residence is Residence.READING
    cache.work(3.0, shared=True)
    assert cache.now == pytest.approx(8.0)  # 6 s at half the speed, in which the disk gets 1.5 s done
    assert first.residence is Residence.READING
    cache.bring((first,))
    assert cache.now == pytest.approx(8.5)
    assert cache.waited["disk read"] == pytest.approx(0.5)


def test_each_use_of_a_piece_takes_the_time_of_who_uses_it() -> None:
    first, second = Piece(100), Piece(100)
    cache = Cache(400, 1 << 20, Traffic(100.0, 100.0, use=0.25))
    cache.bring((first, second), Access.FRESH)
    cache.release((first, second))
    assert cache.now == 0.5
    emptied(cache)
    before = cache.now
    cache.bring((first, second))
    assert cache.now == before + 0.5 + 2.0


@pytest.mark.parametrize("limits", [Limits(None, 3 << 20, 1 << 30), ROOMY], ids=["with a disk", "roomy"])
def test_uses_of_chunks_are_a_part_of_a_step(limits: Limits) -> None:
    free, busy = (simulated(replace(CPU, use=use), limits).seconds for use in (0.0, 1e-3))
    assert busy - free >= 0.02


def test_chunks_pass_through_a_pool_that_is_too_small_for_them(tmp_path: Path) -> None:
    with Passage(tmp_path, 1 << 16, 4) as passage:
        before = passage.moved
        passage.lap()
        # each at most once in and once out, and what the laps beside began for the two that there is room for
        assert 2 << 16 <= passage.moved - before <= (2 * 4 + 2 * 2) << 16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("roomy", [False, True], ids=["tight", "roomy"])
def test_slices_hold_what_is_planned(roomy: bool, tmp_path: Path) -> None:
    rows = {name: torch.cat([value] * 4) for name, value in LLAMA.batch(0).items()}
    run = Case(LLAMA.build, rows, roomy=roomy, microbatch=2)
    limits = run.limits(run.subject())
    planned, found = predict(run, limits, CPU), measure(run, limits, tmp_path)
    assert abs(off(planned.peak["host"], found.peak["host"])) < 0.05
    assert abs(off(planned.settled["host"], found.settled["host"])) < 0.05


@pytest.mark.emulated
def test_slices_hold_what_is_planned_on_a_device(tmp_path: Path, emu: ModuleType) -> None:
    emu.configure(h2d_gbps=EMU.link_in / 1e9, d2h_gbps=EMU.link_out / 1e9)
    rows = {name: torch.cat([value] * 4) for name, value in LLAMA.batch(0).items()}
    run = Case(LLAMA.build, rows, device="emu", microbatch=2)
    limits = run.limits(run.subject())
    planned, found = predict(run, limits, EMU), measure(run, limits, tmp_path)
    assert abs(off(planned.peak["device"], found.peak["device"])) < 0.05
    assert abs(off(planned.peak["host"], found.peak["host"])) < 0.05
    assert abs(off(planned.moved["device out"], found.moved["device out"])) < 0.05
