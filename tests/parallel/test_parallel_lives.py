"""Ranks that were started again find each other, not what is left of those before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from outcore.errors import PeerError
from outcore.parallel.lives import own_store

RANKS = 3


def meet(store: dist.Store, ranks: int = RANKS) -> list[str]:
    """All ranks join; each leaves where it is and reads where the others are."""
    with ThreadPoolExecutor(ranks) as threads:
        stores = list(threads.map(lambda rank: own_store(store, rank, ranks, timeout=20), range(ranks)))
    return [own.get("where").decode() if own.check(["where"]) else "" for own in stores]


def test_each_life_has_a_part_of_the_store_to_itself() -> None:
    store = dist.HashStore()
    assert meet(store) == [""] * RANKS
    first = {key for key in ("asks/1", "asks/2") if store.check([f"outcore/{key}"])}
    assert len(first) == 2
    with ThreadPoolExecutor(2) as threads:  # fewer than before: what rank 2 left must not be waited for
        one, two = threads.map(lambda rank: own_store(store, rank, 2, timeout=20), range(2))
    one.set("where", "here")
    assert two.get("where") == b"here"
    assert meet(store) == [""] * RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_is_named(rank: int) -> None:
    store = dist.HashStore()
    meet(store, 2)
    with pytest.raises(PeerError, match="rank 1" if rank == 0 else "rank 0"):
        own_store(store, rank, 2, timeout=0.2)
