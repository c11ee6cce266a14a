"""The chunks behind one run: parameters, and for trained runs gradients and optimizer states.

All of them are cut alike, so chunk ``k`` of each kind speaks of the same elements. A state chunk holds
its planes (low master bits, moments) one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.layout import Run
from outcore.memory.host import PAGE
from outcore.memory.place import Place


class PlaneType(NamedTuple):
    """One flat array of a state chunk.

    Attributes:
        name: ``"master"``, ``"low"``, a moment by torch's name, or what belongs to one.
        dtype: of its entries.
        shared: how many elements have one entry together; a divisor of `outcore.chunks.layout.ALIGN`.
    """

    name: str
    dtype: torch.dtype
    shared: int = 1

    def nbytes(self, elements: int) -> int:
        """Bytes of the plane of so many elements."""
        return -(-elements // self.shared) * self.dtype.itemsize


Reserve = Callable[[int], Place]
"""Makes a place of so many bytes."""


@dataclass(eq=False)
class RunStore:
    """One run's chunks. ``gradients``, ``totals`` and ``states`` are empty for a run that is not trained.

    Attributes:
        gradients: in the run's dtype, as one backward leaves them.
        totals: in fp32, used from the second contribution on.
        written: the elements whose first values are written here; others write the rest. ``None``: all of them.
    """

    name: str
    run: Run
    parameters: tuple[Chunk, ...]
    gradients: tuple[Chunk, ...]
    totals: tuple[Chunk, ...]
    states: tuple[Chunk, ...]
    planes: tuple[PlaneType, ...]
    written: range | None = None

    def elements(self, k: int) -> int:
        start, stop = self.run.extent(k)
        return stop - start

    def parameter(self, k: int) -> torch.Tensor:
        """The values of chunk ``k``, shape [elements], in the run's dtype; valid under a guard."""
        return typed(self.parameters[k].region, self.run.dtype, self.elements(k))

    def gradient(self, k: int) -> torch.Tensor:
        """The gradients of chunk ``k`` as one backward left them; valid under a guard."""
        return typed(self.gradients[k].region, self.run.dtype, self.elements(k))

    def total(self, k: int) -> torch.Tensor:
        """The fp32 sum of several gradients of chunk ``k``; valid under a guard."""
        return typed(self.totals[k].region, torch.float32, self.elements(k))

    def state(self, k: int, part: slice) -> tuple[torch.Tensor, ...]:
        """The planes of elements [part.start, part.stop) of state chunk ``k``; valid under a guard.

        The part begins where a parameter begins, or at a multiple of `outcore.chunks.layout.ALIGN` from there.
        """
        views = []
        offset = 0
        elements = self.elements(k)
        for plane in self.planes:
            nbytes = plane.nbytes(elements)
            whole = self.states[k].region.tensor[offset : offset + nbytes].view(plane.dtype)
            views.append(whole[part.start // plane.shared : -(-part.stop // plane.shared)])
            offset += nbytes
        return tuple(views)

    def chunks(self) -> tuple[Chunk, ...]:
        return self.parameters + self.gradients + self.totals + self.states


def typed(region: Place, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """The first ``elements`` of a region as a tensor."""
    return region.tensor[: elements * dtype.itemsize].view(dtype)


def gradient_store(name: str, run: Run, reserve: Reserve) -> RunStore:
    """Chunks for a run's gradients alone, before ranks sum them.

    Args:
        reserve: makes their regions (which may have to be reachable by an accelerator).
    """
    count = run.chunks

    def make(itemsize: int) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(
                Kind.GRADIENT,
                f"{name} own gradients {k + 1}/{count}",
                reserve(pages((stop - start) * itemsize)),
            )
            for k, (start, stop) in enumerate(map(run.extent, range(count)))
        )

    narrow = make(run.dtype.itemsize)
    wide = narrow if run.dtype is torch.float32 else make(torch.float32.itemsize)
    return RunStore(name, run, (), narrow, wide, (), ())


Span = Callable[[int, int], Place]
"""Gives the place of the bytes [offset, offset + nbytes) of a run's parameters."""


def build(
    name: str,
    run: Run,
    planes: Sequence[PlaneType],
    span: Span,
    working: Reserve,
    plain: Reserve,
    sums: bool = False,
) -> RunStore:
    """Make the chunks of a run.

    Args:
        name: for messages.
        run: the layout.
        planes: the planes of the optimizer's state for this run; none for a run that is not trained.
        span: gives the place of each parameter chunk. Where computing happens on the host these are
            neighbours in memory, so that the whole run is one tensor.
        working: makes the regions of gradient chunks (which may have to be reachable by an accelerator).
        plain: makes the regions of chunks that only the host reads and writes.
        sums: gradients come summed, in fp32: then the chunks of totals must be as reachable.
    """
    count = run.chunks
    pieces = [run.extent(k) for k in range(count)]

    def label(kind: Kind, k: int) -> str:
        return f"{name} {kind.value} {k + 1}/{count}"

    parameters = tuple(
        Chunk(
            Kind.PARAMETER,
            label(Kind.PARAMETER, k),
            span(start * run.dtype.itemsize, pages((stop - start) * run.dtype.itemsize)),
        )
        for k, (start, stop) in enumerate(pieces)
    )
    if not run.trained:
        return RunStore(name, run, parameters, (), (), (), ())

    def make(kind: Kind, kinds: Sequence[PlaneType], source: Reserve) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(kind, label(kind, k), source(chunk_bytes(kinds, stop - start)))
            for k, (start, stop) in enumerate(pieces)
        )

    gradients = make(Kind.GRADIENT, [PlaneType("gradient", run.dtype)], working)
    totals = make(Kind.GRADIENT, [PlaneType("total", torch.float32)], working if sums else plain)
    if run.dtype is torch.float32:
        totals = gradients
    states = make(Kind.STATE, planes, plain) if planes else ()
    return RunStore(name, run, parameters, gradients, totals, states, tuple(planes))


def chunk_bytes(planes: Sequence[PlaneType], elements: int) -> int:
    """Bytes of a chunk with these planes, in whole pages."""
    return pages(sum(plane.nbytes(elements) for plane in planes))


def span_bytes(run: Run) -> int:
    """Host addresses a run's parameters need."""
    return pages(run.nbytes)


def pages(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE
