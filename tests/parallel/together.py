"""Runs a script on several ranks, each a process of its own, and brings back what each returned or raised.

A script is a function of a `Place`; its module must be importable. Ranks are joined through a file in the test's own
directory.

[Note: Nursery]
Importing torch and outcore takes seconds of each process, far more than what a rank then does. So one process does it
once for all tests of a session (the fork server of `multiprocessing`) and never anything else: it has no thread and no
connection, and each rank is a fork of it. A rank that a test kills costs no more than that.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from emulated import accelerator

NURSERY = multiprocessing.get_context("forkserver")
"""Where ranks come from, see [Note: Nursery]."""

NURSERY.set_forkserver_preload(["parallel.preloaded"])

PATIENCE = 60.0
"""Seconds that ranks may take for a script."""


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


Script = Callable[[Place], Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a rank.

    Attributes:
        value: what the script returned; ``None`` if it did not return.
        error: the class and message of what it raised, and its traceback.
        code: the exit status of its process, if it ended.
        seconds: until it was done.
    """

    value: Any
    error: tuple[str, str, str] | None
    code: int | None
    seconds: float


@contextmanager
def _environment() -> Iterator[None]:
    """What the nursery is started in: one thread for each rank, and the path on which this process finds modules."""
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.pathsep.join(sys.path))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(rank: int, ranks: int, store: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    accelerator.load()  # before the first backward, if a script is to compute on it
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)
        script, path, settings = task
        value, error = None, None
        try:
            value = script(Place(rank, ranks, path, settings))
        except BaseException as raised:
            error = (type(raised).__name__, str(raised), traceback.format_exc())
        pipe.send((value, error))


class Team:
    """Ranks that run one script after the other.

    Args:
        path: a directory of its own.
    """

    def __init__(self, ranks: int, path: Path) -> None:
        self._members = []
        store = path / f"store-{secrets.token_hex(8)}"
        with _environment():
            for rank in range(ranks):
                ours, theirs = NURSERY.Pipe()
                arguments = (rank, ranks, store, theirs)
                process = NURSERY.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._members.append((process, ours))

    def run(self, script: Script, path: Path, patience: float = PATIENCE, **settings: Any) -> list[Outcome]:
        """What became of each rank. One that neither answers in time nor ends is killed."""
        path.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        for _, pipe in self._members:
            pipe.send((script, path, settings))
        outcomes = []
        for process, pipe in self._members:
            value, error, code = None, None, None
            try:
                if pipe.poll(max(0.0, start + patience - time.monotonic())):
                    value, error = pipe.recv()
                else:
                    process.kill()
                    error = ("TimeoutError", f"no answer within {patience} seconds", "")
            except (EOFError, ConnectionResetError):
                process.join()
                code = process.exitcode
            outcomes.append(Outcome(value, error, code, time.monotonic() - start))
        return outcomes

    def end(self) -> None:
        for process, pipe in self._members:
            with suppress(OSError):
                pipe.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def run(script: Script, ranks: int, path: Path, patience: float = PATIENCE, **settings: Any) -> list[Outcome]:
    """The same on ranks that live for one script; ``patience`` counts from when all of them are there."""
    path.mkdir(parents=True, exist_ok=True)
    team = Team(ranks, path)
    try:
        values(team.run(_nothing, path))
        return team.run(script, path, patience, **settings)
    finally:
        team.end()


def _nothing(place: Place) -> None:
    pass


def alone(script: Script, path: Path, **settings: Any) -> Any:
    """What a script returns on one rank: here."""
    path.mkdir(parents=True, exist_ok=True)
    return script(Place(0, 1, path, settings))


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks returned."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}\n{outcome.error[2]}"
        assert outcome.code is None, f"rank {rank} ended with {outcome.code}"
    return [outcome.value for outcome in outcomes]
