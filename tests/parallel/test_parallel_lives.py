"""Ranks that were started again find each other, not what is left of those before."""

from __future__ import annotations

import time
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


def old_and_new(store: dist.Store, rank: int) -> list[str]:
    """A rank of the life before that still waits, and the ranks of this one; what became of each."""

    def joined(rank: int) -> str:
        try:
            own_store(store, rank, 2, timeout=20).set("here", "")
        except PeerError as error:
            return str(error)
        return "joined"

    sign = f"outcore/asks/{rank}" if rank else "outcore/first"
    with ThreadPoolExecutor(4) as threads:
        before = threads.submit(joined, rank)
        old = store.get(sign)  # waits for it
        others = [threads.submit(joined, rank)]
        while store.get(sign) == old:  # who of the other number came earlier would find the old one alone
            time.sleep(0.01)
        others.append(threads.submit(joined, 1 - rank))
        return [*(other.result() for other in others), before.result()]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_left_of_the_life_before_ends(rank: int) -> None:
    one, two, before = old_and_new(dist.HashStore(), rank)
    assert (one, two) == ("joined", "joined")
    assert f"another process has taken the place of this one, rank {rank}" in before


def test_a_first_rank_of_fewer_does_not_call_others() -> None:
    """Rank 1 of three was given up, and two go on without it before their own rank 1 is there."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        before = threads.submit(own_store, store, 1, 3, 20)
        store.get("outcore/asks/1")  # waits for it
        first = threads.submit(own_store, store, 0, 2, 20)
        time.sleep(0.2)
        assert not first.done()
        second = threads.submit(own_store, store, 1, 2, 20)
        first.result().set("where", "here")
        assert second.result().get("where") == b"here"
        with pytest.raises(PeerError, match="another process"):
            before.result()


def test_one_whose_launcher_has_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 1])
    monkeypatch.setattr("os.getppid", lambda: next(parents, 1))
    with pytest.raises(PeerError, match="what launched it has gone"):
        own_store(dist.HashStore(), 1, 2, timeout=20)
