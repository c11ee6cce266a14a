"""Runs a script on several ranks, each a process of its own, and brings back what each returned or raised.

A script is a function of a `Place`; its module must be importable, since ranks are spawned. They are joined through a
file in the test's own directory.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

PATIENCE = 60.0
"""Seconds that ranks may take in all."""


@dataclass(frozen=True)
class Place:
    """Where a script runs.

    Attributes:
        path: the test's directory, the same for all ranks.
    """

    rank: int
    ranks: int
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        """A directory of this rank's own."""
        own = self.path / f"disk{self.rank}"
        own.mkdir(exist_ok=True)
        return own


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        value: what the script returned; ``None`` if it did not return.
        error: the class and message of what it raised, and its traceback.
        code: the exit status of its process.
        seconds: until it ended.
    """

    value: Any
    error: tuple[str, str, str] | None
    code: int | None
    seconds: float


Script = Callable[[Place], Any]


def _work(script: Script, place: Place) -> None:
    torch.set_num_threads(1)
    if place.ranks > 1:
        store = f"file://{place.path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.ranks)
    value, error = None, None
    try:
        value = script(place)
    except BaseException as raised:
        error = (type(raised).__name__, str(raised), traceback.format_exc())
    target = place.path / f"rank{place.rank}"
    target.with_suffix(".tmp").write_bytes(pickle.dumps((value, error)))
    os.rename(target.with_suffix(".tmp"), target)
    os._exit(0 if error is None else 1)


def run(script: Script, ranks: int, path: Path, patience: float = PATIENCE, **settings: Any) -> list[Outcome]:
    """What became of each rank; one that has not ended in time is killed."""
    path.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    start = time.monotonic()
    processes = []
    for rank in range(ranks):
        processes.append(
            context.Process(target=_work, args=(script, Place(rank, ranks, path, settings)), daemon=True)
        )
        processes[-1].start()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.0, start + patience - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        value, error = None, None
        if (path / f"rank{rank}").exists():
            value, error = pickle.loads((path / f"rank{rank}").read_bytes())
        outcomes.append(Outcome(value, error, process.exitcode, time.monotonic() - start))
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks returned."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.error[2]}"
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}"
    return [outcome.value for outcome in outcomes]
