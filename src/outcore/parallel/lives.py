"""A place of this life's own in the store through which ranks find each other.

[Note: Lives]
``torchrun`` keeps one store over all its restarts, and process groups leave in it where their ranks listen. What the
life before left is there still: a rank that comes early reads where its peer was, and connects to nobody. So before
anything else the first rank draws a name, and all of them use the part of the store that has this name. What is
stale must not pass for it: each rank asks with a word that was never used before, and takes the name only as the
answer to that word. The restarts can't be counted instead, because each machine counts its own.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
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
        PeerError: some did not come.
    """
    name = _invite(store, size, timeout) if rank == 0 else _ask(store, rank, timeout)
    return dist.distributed_c10d.PrefixStore(f"outcore/{name}", store)


def _ask(store: Any, rank: int, timeout: float) -> str:
    word = secrets.token_hex(8)
    store.set(f"outcore/asks/{rank}", word)
    try:
        store.wait([f"outcore/answers/{word}"], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise PeerError(0, DOING, f"rank 0 is not there within {timeout:g} seconds") from error
    name = str(store.get(f"outcore/answers/{word}").decode())
    store.set(f"outcore/{name}/came/{rank}", "")
    return name


def _invite(store: Any, size: int, timeout: float) -> str:
    name = secrets.token_hex(8)
    awaited = set(range(1, size))
    end = time.monotonic() + timeout
    while awaited:
        for rank in sorted(awaited):
            if store.check([f"outcore/{name}/came/{rank}"]):
                awaited.remove(rank)
            elif store.check([f"outcore/asks/{rank}"]):
                store.set(f"outcore/answers/{store.get(f'outcore/asks/{rank}').decode()}", name)
        if awaited and time.monotonic() > end:
            missing = ", ".join(map(str, sorted(awaited)))
            raise PeerError(
                min(awaited), DOING, f"not there within {timeout:g} seconds: rank {missing} of {size}"
            )
        time.sleep(PAUSE if awaited else 0)
    return name
