"""Kills runs at random moments and checks what is left.

Children are forked, so that none pays for start-up; the parent itself computes nothing, so that it has no threads
whose locks a child could inherit.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # the children need these, and importing takes a second

import outcore
import outcore.optim.kernels.compiled
from checkpoint.killed import PLACES, run


def kill_loop(folder: Path, kills: int, steps: int, seed: int, longest: float) -> dict[str, int]:
    """Start the run, kill it after a random time up to ``longest`` seconds, again and again; then let it end.

    Each start has its states elsewhere (`PLACES`). The newest checkpoint must load each time, nothing but one
    unfinished checkpoint may be left, and the last run's result must be that of one that was never killed.

    Returns:
        How many kills there were, how many left a temporary folder, and how many complete runs came between.
    """
    whole = folder / "whole"
    assert not killed(whole, steps, None, "memory")
    expected_seen, expected = seen_by(whole), (whole / "done").read_text()
    chance = random.Random(seed)
    counts = {"kills": 0, "leftovers": 0, "finished": 0}
    attempt = 0
    place = folder / "attempt-0"
    shared = set(os.listdir(SHARED))
    while counts["kills"] < kills:
        before = set(temporaries(place))
        if not killed(place, steps, chance.uniform(0.0, longest), chance.choice(list(PLACES))):
            counts["finished"] += 1
            compare(place, expected_seen, expected)
            attempt += 1
            place = folder / f"attempt-{attempt}"
            continue
        counts["kills"] += 1
        left = set(temporaries(place))
        counts["leftovers"] += bool(left - before)
        assert not os.listdir(place / "disk")
        assert not os.listdir(place / "tmp")
        assert not forsaken(set(os.listdir(SHARED)) - shared)
        assert len(left) <= 1, left  # every save removes what dead writers left
        newest = outcore.Checkpoints(place / "run").latest()
        if newest is not None:
            outcore.verify(newest)
    assert not killed(place, steps, None, "disk")
    compare(place, expected_seen, expected)
    return counts


PRELOADED = (torch._dynamo, outcore.optim.kernels.compiled)


SHARED = "/dev/shm"


def forsaken(names: set[str]) -> set[str]:
    """Those of the names in shared memory that no process has open."""
    if not names:
        return names
    used = set()
    for maps in glob.glob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = Path(maps).read_text().splitlines()
            used |= {line.split(SHARED + "/")[-1] for line in lines if SHARED in line}
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            used.add(os.path.basename(os.readlink(link)))
    return names & set(os.listdir(SHARED)) - used


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
    # Each save removes all that is too old. A kill after the very last commit leaves one, and no save follows.
    assert len(kept) <= 3 + (int((place / "steps").read_text()) == 0), kept


def killed(place: Path, steps: int, after: float | None, where: str) -> bool:
    """Run in a child and kill it after a while; whether it was killed before its end."""
    for name in ("disk", "tmp"):
        (place / name).mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                tempfile.tempdir = str(place / "tmp")
                seen, digest = run(place, steps, where)
                (place / "steps").write_text(str(len(seen)))
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
