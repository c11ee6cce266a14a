"""A walk that goes on where it stopped against one from the start: the same window, whatever happens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.chunks.chunk import Chunk, Kind, Residence
from outcore.chunks.lookahead import FURTHEST, NEAR, Lookahead
from outcore.memory.host import PAGE, reserve
from outcore.trace.schedule import Schedule

SIZES = (1, 2, 3) * 4
COUNT = len(SIZES)
ROOMY = 2 * NEAR * max(SIZES)
"""Pages from which on what is near fits in any case. With fewer it stays in the window for its next use, too."""


def walk(schedule: Schedule, limit: int) -> dict[Chunk, int]:
    """In how many ticks each chunk of the window is used, found by walking through all of it."""
    window: dict[Chunk, int] = {}
    for distance in range(1, FURTHEST + 1):
        for chunk in schedule.needs(distance) or ():
            if chunk not in window:
                if sum(c.nbytes for c in window) + chunk.nbytes > limit and distance > NEAR:
                    return window
                window[chunk] = distance
    return window


needs = st.lists(st.integers(0, COUNT - 1), max_size=2, unique=True)
records = st.lists(st.tuples(st.integers(0, 9), needs), min_size=1, max_size=14)
steps = st.lists(
    st.tuples(
        st.one_of(
            st.tuples(st.just("on"), st.integers(1, 12)),
            st.tuples(st.just("lap"), st.integers(0, 1)),
            st.tuples(st.just("skip"), st.integers(1, 3)),
            st.tuples(st.just("other"), st.tuples(st.integers(0, 11), needs)),
            st.tuples(st.just("fulfil"), st.integers(0, 9)),
            st.tuples(st.sampled_from(list(Residence)), st.integers(0, COUNT - 1)),
        ),
        st.booleans(),
    ),
    max_size=50,
)


class Play:
    """A schedule with two laps on record, and a lookahead of so many pages."""

    def __init__(self, laps: tuple[list[tuple[int, list[int]]], ...], pages: int) -> None:
        self.schedule = Schedule()
        self.ahead = Lookahead(self.schedule)
        self.chunks = [
            Chunk(Kind.STATE, f"c{k}", reserve(size * PAGE), Residence.DISK) for k, size in enumerate(SIZES)
        ]
        self.pages = pages
        self.laps = laps
        self.lap = self.at = 0
        for number in (0, 1, 0):
            self.begin(number)
            self.go(len(laps[number]), looking=False)

    def begin(self, number: int) -> None:
        self.lap, self.at = number, 0
        self.schedule.begin(number)

    def advance(self, key: int, needed: list[int]) -> None:
        self.schedule.advance(key, [self.chunks[k] for k in needed])

    def go(self, ticks: int, looking: bool) -> None:
        for _ in range(ticks):
            if self.at >= len(self.laps[self.lap]):
                self.begin(self.lap)
            self.at += 1
            self.advance(*self.laps[self.lap][self.at - 1])
            if looking:
                self.look()

    def move(self, chunk: Chunk, to: Residence) -> None:
        was, chunk.residence = chunk.on_host, to
        if chunk.on_host and not was:
            self.ahead.came(chunk)
        elif was and not chunk.on_host:
            self.ahead.left(chunk)
        elif not chunk.on_host:
            chunk.residence = Residence.EMPTY  # from disk without coming: its bytes were forgotten

    def look(self) -> None:
        ahead, schedule = self.ahead, self.schedule
        ahead.follow(self.pages * PAGE)
        window = {chunk: tick - schedule.now for chunk, tick in ahead._when.items()}
        assert all(distance == schedule.next_use(chunk) for chunk, distance in window.items())
        expected = walk(schedule, self.pages * PAGE)
        assert window == expected if self.pages >= ROOMY else window.items() >= expected.items()
        assert ahead.absent == sum(chunk.nbytes for chunk in window if not chunk.on_host)
        below = [(window[c], c) for c in window if c.residence is Residence.DISK]
        found = ahead.soonest()
        assert (found is None) == (not below)
        assert found is None or (found in below and found[0] == min(distance for distance, _ in below))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(laps=st.tuples(records, records), steps=steps, pages=st.integers(1, 20))
def test_the_window_is_that_of_a_walk_from_the_start(
    laps: tuple[list[tuple[int, list[int]]], ...],
    steps: list[tuple[tuple[object, object], bool]],
    pages: int,
) -> None:
    play = Play(laps, pages)
    for (what, of), looking in steps:
        if what == "on":
            play.go(of, looking)  # type: ignore[arg-type]
        elif what == "lap":
            play.begin(of)  # type: ignore[arg-type]
        elif what == "skip":
            play.at += of  # type: ignore[operator]
        elif what == "other":
            play.advance(*of)  # type: ignore[misc]
        elif what == "fulfil":
            play.schedule.fulfil(of)
        else:
            play.move(play.chunks[of], what)  # type: ignore[call-overload, arg-type]
        if looking:
            play.look()
    play.look()
