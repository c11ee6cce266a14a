"""Who is missing, after a connection broke: a collective only says that somebody is.

Each rank answers the roll call through the store of ``torch.distributed``. Of one on the same machine that does not,
the process table says whether it has ended; one that ended by an error leaves its last words in the store. Who is busy
with something else does not answer either: only of one that has ended is it said that it is gone.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

PATIENCE = 5.0
"""Seconds for which answers are waited for."""

PAUSE = 0.05


@dataclass(frozen=True)
class Life:
    """How to see whether a rank's process has ended."""

    host: str
    process: int
    began: float

    @staticmethod
    def own() -> Life:
        return Life(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def has_ended(self) -> bool:
        """Whether it certainly has; of another machine's process nothing is certain."""
        if self.host != socket.gethostname():
            return False
        try:
            found = psutil.Process(self.process)
            return bool(found.create_time() != self.began or found.status() == psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return True


@dataclass(frozen=True)
class Absence:
    """Who is missing, and what there is to say about it.

    Attributes:
        ended: whether they certainly have.
    """

    ranks: list[int]
    ended: bool
    why: str

    @property
    def said(self) -> str:
        """A sentence without an end."""
        if not self.ranks:
            return "the ranks parted"
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]} " + ("is gone" if self.ended else "does not answer")
        said = ", ".join(map(str, self.ranks))
        return f"ranks {said} " + ("are gone" if self.ended else "do not answer")


class RollCall:
    """Finds those that are missing.

    Args:
        name: the same on all ranks, and no other roll call's.
        number: this rank.
        lives: everyone's.
    """

    def __init__(self, name: str, number: int, lives: list[Life]) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store: Any = torch._C._distributed_c10d.PrefixStore(f"outcore/{name}", store)
        self._number = number
        self._lives = lives
        atexit.register(self._leave)

    def missing(self, doing: str) -> Absence:
        """The ranks that ended, or else those that don't answer."""
        others = [rank for rank in range(len(self._lives)) if rank != self._number]
        silent = others
        try:
            self._store.set(f"here/{self._number}", doing)
        except Exception:
            others = []
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            ended = [rank for rank in silent if self._lives[rank].has_ended()]
            if ended:
                return Absence(ended, True, self._last_words(ended[0]) or "its process has ended")
            try:
                silent = [rank for rank in silent if not self._store.check([f"here/{rank}"])]
            except Exception:  # the rank that kept the store is gone, with all that was in it
                others = []
            if others and not silent:
                return Absence([], False, "all ranks answer, but a connection between them broke")
            time.sleep(PAUSE)
        here = self._lives[self._number].host
        alive = all(self._lives[rank].host == here for rank in silent)
        why = "its process runs, so it is late or hangs" if alive else "it is late, or gone with its machine"
        return Absence(silent, False, why)

    def _last_words(self, rank: int) -> str:
        try:
            if self._store.check([f"left/{rank}"]):
                return f"its process has ended: {self._store.get(f'left/{rank}').decode('utf-8', 'replace')}"
        except Exception:
            return ""
        return ""

    def _leave(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            try:
                self._store.set(f"left/{self._number}", f"{type(error).__name__}: {error}"[:400])
            except Exception:
                return
