"""A pool against a plain dict: whatever the order of calls, bytes are right and the ceiling holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.pool import Access, Guard, Pool
from outcore.chunks.replacers import LRU, NEVER, Belady
from outcore.errors import BudgetError, StateError
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.frames import Frames
from outcore.memory.host import PAGE, reserve
from outcore.memory.ledger import Ledger

COUNT, ROOM = 8, 5
ids = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=3, unique=True)


class Foreseen:
    """An order of uses that the test makes up."""

    now = 0

    def __init__(self) -> None:
        self.coming: list[Chunk] = []
        self._asked = 0

    @property
    def epoch(self) -> int:
        """Another one each time: the list may have changed."""
        self._asked += 1
        return self._asked

    def revised(self) -> None:
        """Any may be."""

    def next_use(self, chunk: Chunk) -> int:
        return self.coming.index(chunk) + 1 if chunk in self.coming else NEVER

    def excused(self) -> Sequence[int]:
        return ()

    def needs(self, distance: int) -> Sequence[Chunk] | None:
        return self.coming[distance - 1 : distance] or None


def build(replacer: str = "Belady", room: int = ROOM) -> tuple[Pool, list[Chunk], Foreseen, DiskTier, Ledger]:
    ledger, order = Ledger(), Foreseen()
    disk = DiskTier([MemoryFile(name="memory")], ledger=ledger, budget=1 << 20)
    policy: Any = Belady(order) if replacer == "Belady" else LRU()
    pool = Pool(ledger, disk, room * PAGE, order, policy)
    frames = Frames()
    places = [frames.place(PAGE) if k % 2 else reserve(PAGE) for k in range(COUNT)]
    return pool, [Chunk(Kind.STATE, f"c{k}", place) for k, place in enumerate(places)], order, disk, ledger


def fill(chunk: Chunk, value: int) -> None:
    chunk.region.tensor.fill_(value)


class Machine(RuleBasedStateMachine):
    replacer = "Belady"

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.chunks, self.order, self.disk, self.ledger = build(self.replacer)
        self.model = dict.fromkeys(range(COUNT), 0)
        self.open: list[tuple[Guard, list[int]]] = []
        self.reserved = self.value = 0

    def pinned(self) -> set[int]:
        return {k for _, chosen in self.open for k in chosen}

    @rule(chosen=ids, access=st.sampled_from(list(Access)), keep=st.booleans())
    def guard(self, chosen: list[int], access: Access, keep: bool) -> None:
        fits = len(self.pinned() | set(chosen)) <= ROOM - self.reserved
        held = {k for k in chosen if self.chunks[k].on_host and self.chunks[k].pins}
        try:
            guard = self.pool.guard([self.chunks[k] for k in chosen], access)
        except BudgetError:
            assert not fits
            return
        assert fits or held
        for k in chosen:
            if access is not Access.FRESH:
                assert (self.chunks[k].region.tensor == self.model[k]).all()
            if access is not Access.READ:
                self.value = self.value % 250 + 1
                fill(self.chunks[k], self.value)
                self.model[k] = self.value
        if keep:
            self.open.append((guard, chosen))
        else:
            guard.close()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        guard, chosen = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        for k in chosen:
            assert (self.chunks[k].region.tensor == self.model[k]).all()
        guard.close()
        guard.close()

    @rule(chosen=ids)
    def discard(self, chosen: list[int]) -> None:
        free = [k for k in chosen if k not in self.pinned()]
        self.pool.discard([self.chunks[k] for k in free])
        for k in free:
            assert self.chunks[k].residence is Residence.EMPTY
            self.model[k] = 0

    @rule(pages=st.integers(0, ROOM))
    def reserve(self, pages: int) -> None:
        self.reserved = pages
        self.pool.reserve(pages * PAGE, pages * PAGE)

    @rule(chosen=st.lists(st.integers(0, COUNT - 1), max_size=6, unique=True))
    def foresee(self, chosen: list[int]) -> None:
        with self.pool.lock:
            self.order.coming = [self.chunks[k] for k in chosen]
            self.pool.advance()

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        self.pool.hold_idle(on)

    @invariant()
    def within(self) -> None:
        self.pool.quiesce()
        with self.pool.lock:
            held = [chunk for chunk in self.chunks if chunk.on_host]
            holding = sum(chunk.nbytes for chunk in held) + self.pool.warm
            assert self.pool.used == holding == self.ledger.held("host")
            assert self.pool._core.held.below == sum(c.residence is Residence.DISK for c in self.chunks)
            assert self.pool.used <= max(self.pool.ceiling, len(self.pinned()) * PAGE)
            assert [c.pins for c in self.chunks] == [
                sum(k in chosen for _, chosen in self.open) for k in range(COUNT)
            ]

    def teardown(self) -> None:
        for guard, _ in self.open:
            guard.close()
        self.pool.reserve(0, 0)
        for k, chunk in enumerate(self.chunks):
            with self.pool.guard([chunk], Access.READ):
                assert (chunk.region.tensor == self.model[k]).all()
        self.pool.close()
        self.disk.close()
        assert self.ledger.held("host") == self.ledger.held("disk") == 0


class MachineLRU(Machine):
    replacer = "LRU"


TestBelady = Machine.TestCase
TestLRU = MachineLRU.TestCase
TestBelady.settings = TestLRU.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_a_guard_that_does_not_fit_leaves_the_pool_usable() -> None:
    pool, chunks, _, disk, _ = build(room=3)
    for k, chunk in enumerate(chunks):
        with pool.guard([chunk], Access.FRESH):
            fill(chunk, k + 1)
    for _ in range(3):
        with pytest.raises(BudgetError):
            pool.guard(chunks[:4], Access.READ)
        assert all(chunk.pins == 0 for chunk in chunks)
        with pool.guard(chunks[4:7], Access.READ):
            assert [int(chunk.region.tensor[-1]) for chunk in chunks[4:7]] == [5, 6, 7]
    pool.close()
    with pytest.raises(StateError, match="released"):
        pool.guard(chunks[:1], Access.READ)
    disk.close()


def test_who_has_all_at_hand_and_room_to_spare_looks_no_further() -> None:
    """The walk through what comes would find nothing to read and nothing to write."""
    pool, chunks, order, disk, _ = build(room=2 * COUNT)
    asked = 0

    def needs(distance: int) -> Sequence[Chunk] | None:
        nonlocal asked
        asked += 1
        return order.coming[distance - 1 : distance] or None

    order.needs = needs  # type: ignore[method-assign]
    order.coming = chunks
    for chunk in chunks:
        pool.guard([chunk], Access.FRESH).close()
    pool.advance()
    assert asked == 0
    assert pool.used == COUNT * PAGE
    pool.reserve((COUNT + 1) * PAGE, (COUNT + 1) * PAGE)  # one has to leave
    pool.quiesce()
    assert asked > 0
    order.coming = [chunk for chunk in chunks if chunk.residence is Residence.DISK]
    assert order.coming
    pool.reserve(0, 0)
    pool.advance()
    pool.quiesce()
    assert all(chunk.on_host for chunk in chunks)
    pool.close()
    disk.close()


def test_what_was_to_be_overwritten_is_as_it_was_where_the_guard_is_refused() -> None:
    pool, chunks, _, disk, _ = build(room=3)
    for k, chunk in enumerate(chunks):
        with pool.guard([chunk], Access.FRESH):
            fill(chunk, k + 1)
    with pytest.raises(BudgetError):
        pool.guard(chunks[:4], Access.FRESH)
    for k, chunk in enumerate(chunks):
        with pool.guard([chunk], Access.READ):
            assert int(chunk.region.tensor[0]) == k + 1
    pool.close()
    disk.close()


def test_a_thread_beside_training_takes_no_room_but_where_nobody_trains() -> None:
    """What is needed sooner stays for it, what nobody foresees doesn't; at rest the last to be needed goes."""
    pool, chunks, order, disk, _ = build()
    pool._core._prefetch = False
    try:
        for k in range(ROOM + 2):
            with pool.guard([chunks[k]], Access.WRITE):
                fill(chunks[k], k)
        absent = [chunk for chunk in chunks[: ROOM + 2] if not chunk.on_host]
        order.coming = [chunk for chunk in chunks if chunk.on_host]

        def beside(chunk: Chunk, beyond: int) -> bool:
            for _ in range(3):  # room may have to be written free first
                guard = pool.guard_if_room([chunk], (), lambda: True, beyond)
                if guard is not None:
                    assert chunk.region.tensor[0] == chunks.index(chunk)
                    guard.close()
                    return True
            return False

        assert not beside(absent[0], NEVER - 1)
        assert beside(absent[0], -1)
        assert [chunk for chunk in order.coming if not chunk.on_host] == order.coming[-1:]
        assert not beside(absent[1], NEVER)  # there is another that nobody foresees, and it may be the next
        assert beside(absent[1], NEVER - 1)
    finally:
        pool.close()
        disk.close()
