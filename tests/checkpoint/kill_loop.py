"""Kills runs at random moments and checks what is left.

Children are forked, so that none pays for start-up; the parent itself computes nothing, so that it has no threads
whose locks a child could inherit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # the children need these, and importing takes a second

import outcore
import outcore.optim.kernels.compiled
from checkpoint.killed import run


def kill_loop(folder: Path, kills: int, steps: int, seed: int, longest: float) -> dict[str, int]:
    """Start the run, kill it after a random time up to ``longest`` seconds, again and again; then let it end.

    The newest checkpoint must load each time, and the last run's result be that of one that was never killed.

    Returns:
        How many kills there were, how many left a temporary folder, and how many complete runs came between.
    """
    whole = folder / "whole"
    assert not killed(whole, steps, None)
    expected_seen, expected = seen_by(whole), (whole / "done").read_text()
    chance = random.Random(seed)
    counts = {"kills": 0, "leftovers": 0, "finished": 0}
    attempt = 0
    place = folder / "attempt-0"
    while counts["kills"] < kills:
        before = set(temporaries(place))
        if not killed(place, steps, chance.uniform(0.0, longest)):
            counts["finished"] += 1
            compare(place, expected_seen, expected)
            attempt += 1
            place = folder / f"attempt-{attempt}"
            continue
        counts["kills"] += 1
        left = set(temporaries(place))
        counts["leftovers"] += bool(left - before)
        assert len(left) <= 1, left  # every save removes what dead writers left
        newest = outcore.Checkpoints(place / "run").latest()
        if newest is not None:
            outcore.verify(newest)
    assert killed(place, steps, None) is False
    compare(place, expected_seen, expected)
    return counts


PRELOADED = (torch._dynamo, outcore.optim.kernels.compiled)


def temporaries(place: Path) -> list[Path]:
    return list((place / "run").glob(".tmp-*"))


def seen_by(place: Path) -> dict[int, Any]:
    """What each step of a run showed."""
    return {
        int(file.name[5:]): json.loads(file.read_text()) for file in place.glob("seen-*") if not file.suffix
    }


def compare(place: Path, expected_seen: dict[int, Any], expected: str) -> None:
    """A finished attempt against the run that was never killed."""
    assert (place / "done").read_text() == expected
    seen = seen_by(place)
    assert seen
    for step, values in seen.items():
        assert values == expected_seen[step], step
    assert temporaries(place) == []
    kept = outcore.Checkpoints(place / "run").steps()
    last = len(expected_seen)
    assert kept[-3:] == list(range(max(0, last - 3), last)), kept
    assert len(kept) <= 4, kept  # a kill between the last commit and the end of an old one leaves that


def killed(place: Path, steps: int, after: float | None) -> bool:
    """Run in a child and kill it after a while; whether it was killed before its end."""
    place.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                _, digest = run(place, steps)
                (place / "done").write_text(digest)
                status = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
        os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the run failed by itself"
    return False
