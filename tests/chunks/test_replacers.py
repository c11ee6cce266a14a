"""A heap of ranks against a search through all candidates: the same victims, whatever the schedule goes through."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.replacers import LRU, Belady
from outcore.memory.host import PAGE, reserve
from outcore.trace.schedule import Schedule

COUNT = 8


def best(schedule: Schedule, free: list[Chunk], beyond: int) -> tuple[int, bool, int] | None:
    """The rank of the chunk that is needed last, found by looking at all."""
    ranks = [(schedule.next_use(c), c.residence is Residence.CLEAN, -c.last_use) for c in free]
    return max((rank for rank in ranks if rank[0] > beyond), default=None)


ticks = st.tuples(st.integers(0, 5), st.lists(st.integers(0, COUNT - 1), max_size=2, unique=True))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("lap"), st.sampled_from("ab")),
        st.tuples(st.just("tick"), ticks),
        st.tuples(st.just("fulfil"), st.integers(0, 5)),
        st.tuples(st.just("pin"), st.integers(0, COUNT - 1)),
        st.tuples(st.just("unpin"), st.integers(0, COUNT - 1)),
        st.tuples(st.just("clean"), st.integers(0, COUNT - 1)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps=steps, beyond=st.integers(-1, 4))
def test_the_chunk_that_is_needed_last_leaves(steps: list[tuple[str, object]], beyond: int) -> None:
    schedule = Schedule()
    replacer = Belady(schedule)
    chunks = [Chunk(Kind.STATE, f"c{k}", reserve(PAGE), Residence.DIRTY) for k in range(COUNT)]

    def may_leave(chunk: Chunk) -> bool:
        return chunk.pins == 0

    for chunk in chunks:
        replacer.offer(chunk)
    for clock, (what, of) in enumerate(steps, 1):
        if what == "lap":
            schedule.begin(of)
        elif what == "tick":
            key, needs = of  # type: ignore[misc]
            schedule.advance(key, [chunks[k] for k in needs])
        elif what == "fulfil":
            schedule.fulfil(of)
        else:
            chunk = chunks[of]  # type: ignore[call-overload]
            if what == "clean" and not chunk.pins:
                chunk.residence = Residence.CLEAN
            chunk.pins = int(what == "pin")
            chunk.last_use = clock if what == "unpin" else chunk.last_use
            if not chunk.pins:
                replacer.offer(chunk)
        found = None
        with closing(replacer.leaving(may_leave, beyond)) as leaving:
            for chunk in leaving:
                found = (schedule.next_use(chunk), chunk.residence is Residence.CLEAN, -chunk.last_use)
                break
        assert found == best(schedule, [c for c in chunks if not c.pins], beyond)


def test_all_that_may_leave_come_in_order() -> None:
    schedule = Schedule()
    replacer = Belady(schedule)
    chunks = [Chunk(Kind.STATE, f"c{k}", reserve(PAGE), Residence.DIRTY) for k in range(4)]
    for _ in range(2):
        schedule.begin("lap")
        for k, chunk in enumerate(chunks):
            schedule.advance(k, [chunk])
    for chunk in chunks:
        replacer.offer(chunk)
    for _ in range(2):  # looking takes nothing away
        with closing(replacer.leaving(lambda chunk: chunk is not chunks[2], -1)) as leaving:
            assert list(leaving) == [chunks[3], chunks[1], chunks[0]]
    with closing(replacer.leaving(lambda chunk: True, 1)) as leaving:
        assert list(leaving) == [chunks[3], chunks[1]]  # the third was not offered again


def test_without_a_schedule_the_least_recently_used_leaves() -> None:
    replacer = LRU()
    chunks = [Chunk(Kind.STATE, f"c{k}", reserve(PAGE), Residence.DIRTY, last_use=3 - k) for k in range(3)]
    for chunk in chunks:
        replacer.offer(chunk)
    chunks[2].last_use = 9
    replacer.offer(chunks[2])
    with closing(replacer.leaving(lambda chunk: True, -1)) as leaving:
        assert list(leaving) == [chunks[1], chunks[0], chunks[2]]
    with closing(replacer.leaving(lambda chunk: True, 0)) as leaving:
        assert list(leaving) == []
