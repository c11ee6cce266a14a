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

An update rule that must see a parameter as a whole (a foreign optimizer, a factored moment) asks for *whole*
parameters: then a cut falls only where a parameter starts, and a large parameter makes a large chunk.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        offset: first element within the run.
    """

    index: int
    shape: torch.Size
    offset: int

    @property
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
        cuts: the first element of each chunk.
    """

    dtype: torch.dtype
    trained: bool
    slots: tuple[Slot, ...]
    numel: int
    cuts: tuple[int, ...]

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

    def segments(self, chunk: int) -> Iterator[Segment]:
        """The pieces of parameters in a chunk, in order."""
        start, stop = self.extent(chunk)
        for slot in self.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if low < high:
                yield Segment(slot, low - start, high - start, low - slot.offset)

    def covering(self, slot: Slot) -> range:
        """The chunks that hold a parameter."""
        if slot.numel == 0:
            return range(0)
        last = slot.offset + slot.numel - 1
        return range(bisect_right(self.cuts, slot.offset) - 1, bisect_right(self.cuts, last))


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
