"""Contenders in turn, A B A B, each turn in a process of its own, so that what disturbs the machine hits all alike."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sides.group import enter
from sides.turn import MARK

HERE = Path(__file__).resolve().parents[1]


@dataclass
class Score:
    """What one contender's turns came to; ``failure`` says why there is none."""

    name: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def readings(self, what: str) -> list[float]:
        found: list[float] = []
        for turn in self.turns:
            found += turn[what] if isinstance(turn[what], list) else [turn[what]]
        return found

    def median(self, what: str) -> float:
        return statistics.median(self.readings(what))

    def most(self, what: str) -> float:
        return max(turn[what] for turn in self.turns)


@dataclass(frozen=True)
class Place:
    """Where turns run.

    Attributes:
        ranks: processes of a turn, which train together.
        python: the interpreter of each contender, by the first word of its name, if not this one.
        group: the memory control group.
        disk: a folder for swap files, emptied after each turn.
    """

    disk: Path
    threads: int
    group: Path | None = None
    python: dict[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    ranks: int = 1


def take_turns(
    asked: dict[str, dict[str, Any]], place: Place, rounds: int, before: Callable[[], None] = lambda: None
) -> dict[str, Score]:
    """Run every contender once a round.

    Args:
        asked: the arguments of each contender's turn, by the name it is shown under.
        before: called before each turn.
    """
    scores = {name: Score(name) for name in asked}
    for number in range(rounds):
        for name, arguments in asked.items():
            score = scores[name]
            if score.failure is not None:
                continue
            before()
            result, failure = _turn(arguments, place)
            if result is None:
                score.failure = failure
                print(f"  round {number + 1}: {name}: {failure}", flush=True)
                continue
            score.turns.append(result)
            seconds = ", ".join(f"{second:.2f}" for second in result["seconds"])
            print(
                f"  round {number + 1}: {name}: {seconds} s, {result['peak_rss'] / 2**30:.2f} GiB", flush=True
            )
    return scores


def _turn(arguments: dict[str, Any], place: Place) -> tuple[dict[str, Any] | None, str]:
    results, failure = run_ranks("sides.turn", arguments, place)
    return (together(results), "") if results else (None, failure)


def run_ranks(
    module: str, arguments: dict[str, Any], place: Place, before: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], str]:
    """What each rank of a turn printed; nothing, and why, if one failed.

    Args:
        module: what each of them runs, with the arguments as JSON.
        before: the command that runs them, if not this process.
    """
    folder = tempfile.mkdtemp(dir=place.disk, prefix="turn-")
    given = {**arguments, "threads": place.threads, "disk": folder}
    python = place.python.get(arguments.get("contender", "").split(",")[0], sys.executable)
    environment = {**os.environ, "OMP_NUM_THREADS": str(place.threads), "PYTHONPATH": _path()}
    environment["PATH"] = os.pathsep.join(
        [str(Path(python).parent), str(Path(sys.executable).parent), environment.get("PATH", "")]
    )
    if place.ranks > 1:
        given["ranks"] = place.ranks
        environment |= {"WORLD_SIZE": str(place.ranks), "LOCAL_WORLD_SIZE": str(place.ranks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*before, python, "-m", module, json.dumps(given)],
            cwd=HERE,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if place.ranks > 1
            else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=functools.partial(enter, place.group) if place.group else None,
        )
        for rank in range(place.ranks)
    ]
    end = time.monotonic() + place.timeout
    try:
        with ThreadPoolExecutor(place.ranks) as readers:
            heard = list(readers.map(lambda rank: rank.communicate(timeout=end - time.monotonic()), ranks))
    except subprocess.TimeoutExpired:
        return [], f"not done within {place.timeout:.0f} s"
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
        shutil.rmtree(folder, ignore_errors=True)
    results = []
    for rank, (out, errors) in zip(ranks, heard, strict=True):
        marked = [line for line in out.splitlines() if line.startswith(MARK)]
        if rank.returncode == -9:
            return [], "killed: the memory limit was too small"
        if rank.returncode != 0 or not marked:
            said = [line for line in errors.splitlines() if line.strip()]
            return [], f"ended with {rank.returncode}: {said[-1][:300] if said else 'no message'}"
        results.append(json.loads(marked[-1].removeprefix(MARK)))
    return results, ""


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of a turn came to: the time of the slowest, the processor time of all, the largest peaks."""
    if len(results) == 1:
        return results[0]
    each = {
        what: list(zip(*(one[what] for one in results), strict=True)) for what in ("seconds", "processor")
    }
    peaks = ("peak_rss", "peak_steps", "peak_device")
    return {
        **results[0],
        **{what: max(one[what] for one in results) for what in peaks},
        "seconds": [max(step) for step in each["seconds"]],
        "processor": [sum(step) for step in each["processor"]],
        "loss": statistics.mean(one["loss"] for one in results),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _path() -> str:
    import outcore

    source = str(Path(outcore.__file__).resolve().parents[1])
    return os.pathsep.join([str(HERE), source, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
