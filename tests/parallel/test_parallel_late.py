"""A rank that works by itself for longer than ranks are waited for is waited for; one that is gone is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore.checkpoint import series
from outcore.errors import (
    CheckpointError,
    PeerError,
    StateError,
)
from outcore.memory.ledger import WIRE, Ledger
from outcore.parallel.ranks import World
from parallel.loops import stack
from parallel.together import Place, Team, run, values

TIMEOUT = 3.0
"""Seconds for which ranks are waited for here."""

LONG = 1.5 * TIMEOUT


def work(world: World, doing: str, seconds: float, end: Callable[[], None] = lambda: None) -> None:
    """What takes this rank some time, and how it ends."""
    with world.together(doing):
        time.sleep(seconds)
        end()


def _late() -> None:
    raise CheckpointError("late")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_work(place: Place) -> list[str]:
    """Each rank works in its turn, then all of them, and then nobody for long."""
    world = World(outcore.Sharding(timeout=TIMEOUT))
    found = []
    for busy in (0, place.ranks - 1, None):
        seconds = (
            0.0 if busy not in (place.rank, None) else LONG if busy is not None else LONG + 0.1 * place.rank
        )
        work(world, f"the work of {busy}", seconds)
        found.append([int(said) for said in world.words(b"%d" % place.rank, "a word")])
    before = time.monotonic()
    for _ in range(20):
        work(world, "what takes no time", 0)
    assert time.monotonic() - before < LONG  # nobody waits for the next sign
    with pytest.raises(CheckpointError, match="late" if place.rank == 1 else "rank 1: late"):
        work(world, "what fails late", *((LONG, _late) if place.rank == 1 else (0,)))
    world.agree("that all is well")
    world.leave()
    return found


def test_who_is_at_work_is_waited_for(three: Team, tmp_path: Path) -> None:
    for found in values(three.run(at_work, tmp_path)):
        assert found == [[0, 1, 2]] * 3


def waited(place: Place) -> float:
    """The first rank works, and gives a sign that the second one, who comes later, hears when it is there."""
    world = World(outcore.Sharding(timeout=TIMEOUT))
    ledger = Ledger()
    world.report_to(ledger)
    time.sleep(2 * place.rank)
    work(world, "the work", 4 * (1 - place.rank))
    world.leave()
    return ledger.snapshot().waited[WIRE]


def test_only_what_the_training_waits_for_counts(tmp_path: Path) -> None:
    first, second = values(run(waited, 2, tmp_path))
    assert first < 0.5
    assert second > 1.5


def killed_meanwhile(place: Place) -> float:
    """The first rank works, the second one waits, the third is killed."""
    world = World(outcore.Sharding(timeout=600))
    before = time.monotonic()
    with pytest.raises(PeerError, match="rank 2 is gone in the work: its process has ended") as raised:
        work(world, "the work", *((LONG,), (0,), (1, _killed))[place.rank])
    assert raised.value.rank == 2
    with pytest.raises(StateError, match="start all of them again"):
        world.agree("anything")
    return time.monotonic() - before


def test_who_is_killed_is_missed_at_once(tmp_path: Path) -> None:
    first, second, third = run(killed_meanwhile, 3, tmp_path)
    assert third.code == -signal.SIGKILL
    assert second.error is None, second.error
    assert first.error is None, first.error
    assert second.value < 20  # whatever the time-out is
    assert first.value < LONG + 20


def late(place: Place) -> str:
    """The second rank is elsewhere, and alive."""
    world = World(outcore.Sharding(timeout=TIMEOUT))
    if place.rank == 1:
        time.sleep(TIMEOUT + 12)
        return ""
    with pytest.raises(PeerError) as raised:
        work(world, "the work", 0)
    assert raised.value.rank == 1
    return str(raised.value)


def test_who_is_late_is_not_said_to_be_gone(tmp_path: Path) -> None:
    said, _ = values(run(late, 2, tmp_path))
    assert "gone" not in said
    assert "rank 1 does not answer in the work: its process runs, so it is late or hangs" in said


def slow_checkpoints(place: Place) -> list[int]:
    """One rank reads an old checkpoint, and removes another, for longer than the others wait elsewhere."""
    model = stack()
    optimizer = outcore.AdamW(model.parameters())
    sharding = outcore.Sharding(timeout=TIMEOUT)
    outcore.offload(model, optimizer, device="cpu", budget=outcore.Budget(host="64MiB"), sharding=sharding)
    checkpoints = outcore.Checkpoints(place.path / "series", keep=1)
    checkpoints.save(1, model, optimizer)
    checkpoints.save(2, model, optimizer)
    if place.rank == 0:
        [file] = checkpoints.path(2).glob("parameters-*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    verify, discard = series.verify, series.discard
    calls = []

    def slowly(function: Any) -> Any:
        def called(path: Path) -> Any:
            calls.append(path)
            time.sleep(LONG)
            return function(path)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "verify", slowly(verify))
        checkpoints.save(2, model, optimizer)
        patch.setattr(series, "discard", slowly(discard))
        checkpoints.save(3, model, optimizer)
    assert len(calls) == (2 if place.rank == 0 else 0)
    outcore.release(model)
    return checkpoints.steps()


def test_one_rank_may_read_and_remove_checkpoints_for_long(two: Team, tmp_path: Path) -> None:
    assert values(two.run(slow_checkpoints, tmp_path)) == [[3], [3]]
