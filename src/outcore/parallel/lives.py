"""A place of this life's own in the store through which ranks find each other.

[Note: Lives]
``torchrun`` keeps one store over all its restarts, and process groups leave in it where their ranks listen. What the
life before left is there still: a rank that comes early reads where its peer was, and connects to nobody. So before
anything else the first rank draws a name, and all of them use the part of the store that has this name. What is
stale must not pass for it: each rank asks with a word that was never used before, and the first rank counts only those
that answer its call of that word. The restarts can't be counted instead, because each machine counts its own.

A process of the life before may still be there, on a machine that the others gave up: it asks and calls like any. So
of two first ranks the later one counts, and of two others with one number the later one, until all have come and the
roster is written; who is not on it ends. Who was started among another number of ranks is not heard, and one whose
launcher has gone ends by itself. One that none of this tells from its successor, and that answers before that one
is there, is taken for it: connecting to it fails when it is ended, and the ranks start again.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Any

import torch.distributed as dist

from outcore.errors import PeerError
from outcore.parallel.sharding import TIMEOUT

PAUSE = 0.02
"""Seconds between two looks at who has come."""

DOING = "the start"


def own_store(store: Any, rank: int, size: int, timeout: float = TIMEOUT) -> Any:
    """The part of a store that these ranks, in this life, have to themselves; all of them call this together.

    Args:
        store: the same ``torch.distributed.Store`` for all, with whatever is in it.
        rank: this one, among ``size``.
        timeout: seconds after which ranks that do not come are given up.

    Raises:
        PeerError: some did not come; or another process has taken this one's place, or its launcher has gone.
    """
    inner = dist.distributed_c10d.PrefixStore("outcore", store)
    wait = _Patience(timeout, rank)
    name = _invite(inner, size, wait) if rank == 0 else _ask(inner, rank, size, wait)
    return dist.distributed_c10d.PrefixStore(f"outcore/{name}", store)


class _Patience:
    """Waits between two looks, as long as there is something to wait for."""

    def __init__(self, timeout: float, rank: int) -> None:
        self.seconds = timeout
        self._rank = rank
        self._end = time.monotonic() + timeout
        self._launcher = os.getppid()

    def is_over(self) -> bool:
        """Pause; true if it was the last time.

        Raises:
            PeerError: this process was left behind by its launcher.
        """
        if os.getppid() != self._launcher:
            raise PeerError(self._rank, DOING, f"rank {self._rank} was left alone: what launched it has gone")
        time.sleep(PAUSE)
        return time.monotonic() > self._end


def _ask(store: Any, rank: int, size: int, wait: _Patience) -> str:
    word = f"{size}-{secrets.token_hex(8)}"
    store.set(f"asks/{rank}", word)
    # All that called: a first rank that is late to see that it was replaced calls over the later one.
    names: set[str] = set()
    while True:
        called = _read(store, f"calls/{word}")
        if called and called not in names:
            names.add(called)
            store.set(f"{called}/here/{word}", "")
        rosters = {name: _read(store, f"{name}/roster").split() for name in names}
        for name, roster in rosters.items():
            if word in roster:
                return name
        if any(rosters.values()) or _read(store, f"asks/{rank}") != word:
            raise PeerError(rank, DOING, f"another process has taken the place of this one, rank {rank}")
        if wait.is_over():
            raise PeerError(0, DOING, f"rank 0 is not there within {wait.seconds:g} seconds")


def _invite(store: Any, size: int, wait: _Patience) -> str:
    name = f"{size}-{secrets.token_hex(8)}"
    store.set("first", name)
    while True:
        words = {rank: _read(store, f"asks/{rank}") for rank in range(1, size)}
        missing = []
        for rank, word in words.items():
            if not word.startswith(f"{size}-") or not store.check([f"{name}/here/{word}"]):
                missing.append(rank)
                if word.startswith(f"{size}-"):
                    store.set(f"calls/{word}", name)
        if _read(store, "first") != name:
            raise PeerError(0, DOING, "another process has taken the place of this one, rank 0")
        if not missing:
            store.set(f"{name}/roster", " ".join(words.values()))
            return name
        if wait.is_over():
            said = ", ".join(map(str, missing))
            raise PeerError(
                missing[0], DOING, f"not there within {wait.seconds:g} seconds: rank {said} of {size}"
            )


def _read(store: Any, key: str) -> str:
    """What is under a key; nothing if it is not there."""
    return str(store.get(key).decode()) if store.check([key]) else ""
