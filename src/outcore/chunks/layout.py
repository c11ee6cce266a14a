"""How the parameters of a unit lie in flat runs, and how a run is cut into chunks.

[Note: Runs]
A unit's parameters are laid out in *runs*: flat arrays of one dtype that are either trained or frozen.
Frozen parameters lie apart, because a state chunk mirrors its parameter chunk and must not carry
moments for weights that never move (LoRA: 99 % of them).

[Note: Cuts]
A run is cut into chunks of equal size, as few as keep each below the wanted size, so that the waste is
below one block per chunk instead of half a chunk per run. Cuts fall on multiples of `BLOCK` elements,
counted from the start of the run: the sums of squares that make the gradient norm are taken block by
block, so a norm never depends on the chunk size. A parameter larger than a chunk simply
spans several: chunks of a run are neighbours in memory on the tier that computes.

Of a run that is sharded a rank keeps a *window*: a run of its own, which holds the elements of one range. Its chunks
are the pieces of the run's chunks that lie in the range, so cuts still fall on whole blocks of the run. A range may
begin and end within a block: the sum of squares of such a block is taken in two parts, by whoever keeps them, and by
those who keep all of it too (`Run.seams`), so that the norm does not depend on who keeps what.

An update rule that must see a parameter as a whole (a foreign optimizer, a factored moment) asks for *whole*
parameters: then a cut falls only where a parameter starts, and a large parameter makes a large chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

ALIGN = 128
"""Elements to which every parameter's offset in a run is aligned (at least one cache line)."""

BLOCK = 65_536
"""Elements of a block: the grain of cuts and of gradient sums (a whole number of pages in any dtype)."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its run.

    Attributes:
        index: the parameter's number within the engine.
        shape: its shape.
        offset: first element within the run; below zero where it begins before a window.
    """

    index: int
    shape: torch.Size
    offset: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in one chunk, in elements from the start of the chunk."""

    slot: Slot
    start: int
    stop: int
    first: int
    """The segment's first element within the flattened parameter."""


@dataclass(frozen=True)
class Run:
    """A flat array of one dtype holding whole parameters of a unit.

    Attributes:
        slots: all parameters, also those of which a window holds nothing.
        cuts: the first element of each chunk.
        first: where a window begins in its run; 0 for a run that is kept whole.
        whole: the run that this is a window of, if it is one.
        seams: elements at which sums of squares are divided, beside whole blocks.
    """

    dtype: torch.dtype
    trained: bool
    slots: tuple[Slot, ...]
    numel: int
    cuts: tuple[int, ...]
    first: int = 0
    whole: Run | None = None
    seams: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.cuts)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding to pages."""
        return self.numel * self.dtype.itemsize

    def extent(self, chunk: int) -> tuple[int, int]:
        """First and one past the last element of a chunk within the run."""
        last = chunk + 1 == len(self.cuts)
        return self.cuts[chunk], self.numel if last else self.cuts[chunk + 1]

    def segments(self, chunk: int) -> Sequence[Segment]:
        """The pieces of parameters in a chunk, in order."""
        return self._segments[chunk]

    @cached_property
    def _segments(self) -> Sequence[Sequence[Segment]]:
        return [tuple(self._in_chunk(chunk)) for chunk in range(self.chunks)]

    def _in_chunk(self, chunk: int) -> Iterator[Segment]:
        start, stop = self.extent(chunk)
        for slot in self.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if low < high:
                yield Segment(slot, low - start, high - start, low - slot.offset)

    def covering(self, slot: Slot) -> range:
        """The chunks that hold a parameter."""
        if slot.numel == 0:
            return range(0)
        low, high = max(slot.offset, 0), min(slot.offset + slot.numel, self.numel)
        if low >= high:
            return range(0)
        return range(bisect_right(self.cuts, low) - 1, bisect_right(self.cuts, high - 1))

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The chunks that hold elements [start, stop): number, first and one past the last element within it."""
        for k in range(max(bisect_right(self.cuts, start) - 1, 0), self.chunks):
            low, high = self.extent(k)
            if low >= stop:
                return
            if max(low, start) < min(high, stop):
                yield k, max(low, start) - low, min(high, stop) - low

    def stretches(self, chunk: int) -> list[tuple[int, int]]:
        """What sums of squares are taken of block by block, in elements from the start of the chunk."""
        start, stop = (edge + self.first for edge in self.extent(chunk))
        marks = {start, stop}
        for seam in (start, *self.seams):
            marks.update(mark for mark in (seam, _round_up(seam, BLOCK)) if start < mark < stop)
        edges = [mark - start for mark in sorted(marks)]
        return list(pairwise(edges))

    # -- sharding ---------------------------------------------------------------------------------

    @property
    def entire(self) -> Run:
        """The run as all ranks together keep it."""
        return self.whole or self

    def share(self, ranks: int) -> int:
        """Elements of an equal slice for each of so many ranks; the last slices may lie beyond the end."""
        return _round_up(-(-self.numel // ranks), ALIGN)

    def spread(self, slot: Slot, ranks: int) -> list[tuple[int, int]]:
        """Which elements of a parameter each of so many ranks keeps; nothing if all of them keep all."""
        if self.whole is None:
            return []
        share, offset = self.whole.share(ranks), slot.offset + self.first
        edges = [min(max(rank * share - offset, 0), slot.numel) for rank in range(ranks + 1)]
        return list(pairwise(edges))

    def window(self, start: int, stop: int) -> Run:
        """The part of the run in [start, stop), which may be empty."""
        start, stop = min(start, self.numel), min(stop, self.numel)
        cuts = () if start == stop else (0, *(cut - start for cut in self.cuts if start < cut < stop))
        slots = tuple(replace(slot, offset=slot.offset - start) for slot in self.slots)
        return Run(self.dtype, self.trained, slots, stop - start, cuts, start, self)

    def seamed(self, share: int) -> Run:
        """The whole run, its sums of squares divided as where slices of ``share`` elements are kept apart."""
        return replace(self, seams=tuple(range(share, self.numel, share)))


@dataclass(frozen=True)
class Entry:
    """What the layout must know of a parameter."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    trained: bool


def lay_out(entries: Sequence[Entry], chunk_numel: int, whole: bool = False) -> tuple[Run, ...]:
    """Lay the parameters of one unit out in runs.

    Args:
        entries: the unit's parameters in the order of their registration.
        chunk_numel: the most elements a chunk should have; rounded up to a whole `BLOCK`.
        whole: don't cut trained parameters.

    Returns:
        One run per dtype and trainability, in the order in which they first appear.
    """
    groups: dict[tuple[torch.dtype, bool], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.dtype, entry.trained), []).append(entry)
    return tuple(
        _whole_run(dtype, group, chunk_numel)
        if whole and trained
        else _run(dtype, trained, group, chunk_numel)
        for (dtype, trained), group in groups.items()
    )


def _run(dtype: torch.dtype, trained: bool, entries: Sequence[Entry], chunk_numel: int) -> Run:
    slots = []
    end = 0
    for entry in entries:
        slots.append(Slot(entry.index, entry.shape, end))
        end += _round_up(math.prod(entry.shape), ALIGN)
    numel = max(end, ALIGN)
    pieces = -(-numel // _round_up(chunk_numel, BLOCK))
    size = _round_up(-(-numel // pieces), BLOCK)
    return Run(dtype, trained, tuple(slots), numel, tuple(range(0, numel, size)))


def _whole_run(dtype: torch.dtype, entries: Sequence[Entry], chunk_numel: int) -> Run:
    slots = []
    cuts = [0]
    end = 0
    for entry in entries:
        size = _round_up(math.prod(entry.shape), ALIGN)
        if end > cuts[-1] and end + size > cuts[-1] + chunk_numel:
            end = _round_up(end, BLOCK)
            cuts.append(end)
        slots.append(Slot(entry.index, entry.shape, end))
        end += size
    return Run(dtype, True, tuple(slots), max(end, ALIGN), tuple(cuts))


def _round_up(value: int, grain: int) -> int:
    return -(-value // grain) * grain
