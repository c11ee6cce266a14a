from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.chunks.layout import ALIGN, BLOCK, Entry, Run, lay_out

shapes = st.lists(st.lists(st.integers(0, 400), min_size=0, max_size=3), min_size=1, max_size=12)
kinds = st.tuples(st.sampled_from([torch.bfloat16, torch.float32]), st.booleans())


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    return [Entry(i, torch.Size(shape), *draw(kinds)) for i, shape in enumerate(draw(shapes))]


def pieces(run: Run) -> dict[int, list[tuple[int, int]]]:
    """For each parameter the ranges of its elements that the chunks hold, in order."""
    found: dict[int, list[tuple[int, int]]] = {slot.index: [] for slot in run.slots}
    for k in range(run.chunks):
        for segment in run.segments(k):
            found[segment.slot.index].append((segment.first, segment.first + segment.stop - segment.start))
    return found


@given(entries(), st.integers(1, 10 * BLOCK))
def test_every_element_lies_in_exactly_one_chunk(given_entries: list[Entry], chunk_numel: int) -> None:
    runs = lay_out(given_entries, chunk_numel)
    seen = {}
    for run in runs:
        for index, ranges in pieces(run).items():
            seen[index] = ranges
    assert seen.keys() == {entry.index for entry in given_entries}
    for entry in given_entries:
        numel, position = math.prod(entry.shape), 0
        for start, stop in seen[entry.index]:
            assert start == position
            position = stop
        assert position == numel


@given(entries(), st.integers(1, 10 * BLOCK))
def test_cuts_fall_on_blocks_and_slots_are_aligned(given_entries: list[Entry], chunk_numel: int) -> None:
    for run in lay_out(given_entries, chunk_numel):
        assert all(cut % BLOCK == 0 for cut in run.cuts)
        sizes = [stop - start for start, stop in map(run.extent, range(run.chunks))]
        assert max(sizes) <= -(-chunk_numel // BLOCK) * BLOCK
        assert all(slot.offset % ALIGN == 0 for slot in run.slots)
        ends = [run.extent(k) for k in range(run.chunks)]
        assert ends[0][0] == 0
        assert ends[-1][1] == run.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


@given(entries(), st.integers(1, 3 * BLOCK), st.integers(1, 3 * BLOCK))
def test_places_do_not_depend_on_the_chunk_size(given_entries: list[Entry], one: int, other: int) -> None:
    assert [run.slots for run in lay_out(given_entries, one)] == [
        run.slots for run in lay_out(given_entries, other)
    ]


@given(entries(), st.integers(1, 3 * BLOCK))
def test_covering_names_the_chunks_of_a_parameter(given_entries: list[Entry], chunk_numel: int) -> None:
    for run in lay_out(given_entries, chunk_numel):
        for slot in run.slots:
            holding = [k for k in range(run.chunks) if any(s.slot is slot for s in run.segments(k))]
            assert list(run.covering(slot)) == holding


@given(entries(), st.integers(1, 3 * BLOCK))
def test_whole_parameters_are_never_cut(given_entries: list[Entry], chunk_numel: int) -> None:
    for run in lay_out(given_entries, chunk_numel, whole=True):
        assert all(cut % BLOCK == 0 for cut in run.cuts)
        for slot in run.slots:
            assert len(run.covering(slot)) <= (1 if run.trained else run.chunks)


def test_runs_keep_dtypes_and_frozen_parameters_apart() -> None:
    kinds = [(torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]
    runs = lay_out([Entry(i, torch.Size([8]), *kind) for i, kind in enumerate(kinds)], BLOCK)
    assert [(run.dtype, run.trained, [s.index for s in run.slots]) for run in runs] == [
        (torch.bfloat16, True, [0, 3]),
        (torch.float32, True, [1]),
        (torch.bfloat16, False, [2]),
    ]
