"""One of four ranks is killed, raises, or finds its disk full: all end soon, and say which one and in what."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outcore.errors import DiskFullError
from outcore.memory.disk import DiskTier
from outcore.model import weights as weights_of
from outcore.model.host_frames import HostFrames
from outcore.optim.gradients import Gradients
from outcore.optim.pipeline import Pipeline
from outcore.optim.reduction import Reduction
from outcore.parallel.ranks import World
from parallel.loops import Way, apart, offloaded, stack, train
from parallel.together import Outcome, Place, run

BAD = 2
"""The rank that fails."""

LIMIT = 30.0
"""Seconds in which all must have ended."""

POINTS: dict[str, tuple[Any, str, int]] = {
    "first values": (World, "same", 3),
    "gather in forward": (HostFrames, "_fill", 3),
    "gather in backward": (HostFrames, "_fill", 9),
    "gather in the second step": (HostFrames, "_fill", 14),
    "own gradients": (Reduction, "_collect", 2),
    "summed gradients": (Gradients, "add_range", 3),
    "norm": (World, "all_sums", 2),
    "step": (Pipeline, "begin", 2),
    "update": (Pipeline, "_apply", 5),
    "reading": (weights_of, "_read", 4),
}
"""Where: what is patched, and at which of its calls it happens."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _raise() -> None:
    raise ZeroDivisionError("planned")


def _full() -> None:
    raise DiskFullError("no space is left here")


HOW: dict[str, Callable[[], None]] = {"kill": _kill, "terminate": _terminate, "raise": _raise, "full": _full}


def _strike(where: Any, name: str, at: int, strike: Callable[[], None]) -> None:
    original = getattr(where, name)
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            strike()
        return original(*args, **kwargs)

    setattr(where, name, patched)


def failing(place: Place) -> None:
    way = Way(steps=3, host="2500KiB", disk=True)
    if place.rank == BAD:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # here: an update may strike on another thread
        _strike(*POINTS[place.settings["point"]], HOW[place.settings["how"]])
    model = stack()
    with apart(place.settings.get("apart", False)):
        optimizer = offloaded(model, way, place)
    train(model, optimizer, way, place)


def check(outcomes: list[Outcome], how: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.seconds < LIMIT, (rank, outcome)
        if rank != BAD:
            assert outcome.error is not None, rank
            assert outcome.error[0] == "PeerError", outcome.error
            assert f"rank {BAD}" in outcome.error[1], outcome.error
            assert " in the " in outcome.error[1], outcome.error
    bad = outcomes[BAD]
    if how in ("kill", "terminate"):
        assert bad.code == -(signal.SIGKILL if how == "kill" else signal.SIGTERM)
    else:
        assert bad.error is not None
        assert bad.error[0] == {"raise": "ZeroDivisionError", "full": "DiskFullError"}[how]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("point", ["gather in backward", "summed gradients"])
def test_a_rank_is_killed(point: str, far: bool, tmp_path: Path) -> None:
    check(run(failing, 4, tmp_path, patience=45, point=point, how="kill", apart=far), "kill")


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_fails_anywhere(point: str, how: str, tmp_path: Path) -> None:
    check(run(failing, 4, tmp_path, patience=45, point=point, how=how), how)


def really_full(place: Place) -> None:
    """The swap file of one rank finds no space."""
    way = Way(steps=3, host="2500KiB", disk=True)
    if place.rank == BAD:
        _strike(DiskTier, "allocate", 4, _full)
    model = stack()
    optimizer = offloaded(model, way, place)
    train(model, optimizer, way, place)


def test_a_swap_file_without_space(tmp_path: Path) -> None:
    check(run(really_full, 4, tmp_path, patience=45), "full")
