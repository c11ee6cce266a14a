"""Parameters and moments as streams: from chunks to cursors and back, a small part at a time.

What is streamed does not depend on where anything is: of a trained parameter the fp32 master and the moments
by torch's names, of others the values. Each parameter's parts come from its first element to its last, whatever
the chunk size. A part has at most `PART` elements, so staging takes no more than `PART` times 4 bytes
for the master and each moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.layout import Run, Segment
from outcore.chunks.pool import Access
from outcore.chunks.store import RunStore
from outcore.engine import Engine
from outcore.model.unit import Binding
from outcore.optim.kernels import Rule

PART = 128 * 1024
"""The most elements that are staged at a time."""


class Sink(Protocol):
    """Takes a tensor's elements in order."""

    def write(self, values: torch.Tensor) -> None: ...


class Source(Protocol):
    """Gives a tensor's elements in order."""

    def read(self, count: int) -> torch.Tensor: ...


class SeekingSource(Source, Protocol):
    """Gives a part of a tensor's elements in order, as ranks need that keep only slices."""

    def seek(self, element: int) -> None:
        """Go on with an element further on. What was passed over is not verified."""

    def rest(self) -> None:
        """Verify what is left, if everything before was read."""


@dataclass(frozen=True)
class Part:
    """A stretch of one parameter within a chunk that is pinned while the part is used."""

    binding: Binding
    parameter: torch.Tensor
    planes: tuple[torch.Tensor, ...]
    first: int
    """The part's first element within the flattened parameter."""


def bindings(engine: Engine) -> Iterator[Binding]:
    """All parameters, in the order of units."""
    for unit in engine.units:
        yield from unit.bindings


def moment_names(engine: Engine, binding: Binding) -> tuple[str, ...]:
    """The moments of a parameter, by torch's names; none if it is not trained."""
    run = binding.store.run
    if not run.trained or engine.rule is None:
        return ()
    return tuple(
        engine.rule.moments(tuple(torch.empty(0, dtype=plane.dtype) for plane in binding.store.planes))
    )


def full_dtype(binding: Binding) -> torch.dtype:
    """The dtype of a parameter in full precision."""
    run = binding.store.run
    return torch.float32 if run.trained else run.dtype


def read(engine: Engine, values: Mapping[str, Sink], moments: Mapping[str, Mapping[str, Sink]]) -> None:
    """Stream all parameters out; ``moments`` may be empty."""
    staging = torch.empty(PART)
    for part in _parts(engine, Access.READ):
        read_part(part, engine.rule, values, moments, staging)


def read_chunk(
    store: RunStore,
    k: int,
    of: Mapping[int, Binding],
    rule: Rule | None,
    values: Mapping[str, Sink],
    moments: Mapping[str, Mapping[str, Sink]],
) -> None:
    """Stream one chunk of a run out, under a guard of `chunks_of` it; those before it were.

    Args:
        of: the run's parameters by number.
    """
    staging = torch.empty(PART)
    for part in parts_of(store, k, of):
        read_part(part, rule, values, moments, staging)


def chunks_of(store: RunStore, k: int) -> tuple[Chunk, ...]:
    """The chunks that hold what is saved of chunk ``k`` of a run."""
    return (store.parameters[k], *store.states[k : k + 1])


def write_slices(
    engine: Engine,
    values: Mapping[str, SeekingSource],
    moments: Mapping[str, Mapping[str, SeekingSource]],
    whole: bool,
) -> None:
    """Stream in what this rank keeps of all parameters, from sources of all of each; moments that are not given stay.

    Each tensor is verified by the rank that keeps its first element. What is replaced as a whole is not read from the
    disk before, where it may be damaged.

    Args:
        whole: all moments are given.
    """
    ends: dict[str, int] = {}
    for part in _parts(engine, Access.FRESH if whole else Access.WRITE):
        name, count = part.binding.name, part.parameter.numel()
        sources = moments.get(name, {})
        if ends.get(name, 0) != part.first:
            for source in (values[name], *sources.values()):
                source.seek(part.first)
        _write_part(part, engine.rule, values[name], sources)
        ends[name] = part.first + count
    for name in ends:
        for source in (values[name], *moments.get(name, {}).values()):
            source.rest()


def write(
    engine: Engine, values: Mapping[str, Source], moments: Mapping[str, Mapping[str, Source]], whole: bool
) -> None:
    """The same in order, where one process keeps everything."""
    for part in _parts(engine, Access.FRESH if whole else Access.WRITE):
        name = part.binding.name
        _write_part(part, engine.rule, values[name], moments.get(name, {}))


def _write_part(part: Part, rule: Rule | None, values: Source, moments: Mapping[str, Source]) -> None:
    count = part.parameter.numel()
    new = values.read(count)
    if moments and rule is not None:
        rule.set_moments(part.planes, {moment: source.read(count) for moment, source in moments.items()})
    if part.binding.store.states and rule is not None:
        rule.set_master(part.parameter, part.planes, new.float())
    else:
        part.parameter.copy_(new)


def read_part(
    part: Part,
    rule: Rule | None,
    values: Mapping[str, Sink],
    moments: Mapping[str, Mapping[str, Sink]],
    staging: torch.Tensor,
) -> None:
    name = part.binding.name
    values[name].write(_full(part, rule, staging))
    sinks = moments.get(name)
    if sinks and rule is not None:
        for moment, tensor in rule.moments(part.planes).items():
            sinks[moment].write(tensor)


def _full(part: Part, rule: Rule | None, staging: torch.Tensor) -> torch.Tensor:
    if not part.binding.store.states or rule is None:
        return part.parameter
    out = staging[: part.parameter.numel()]
    rule.master(part.parameter, part.planes, out)
    return out


def _parts(engine: Engine, access: Access) -> Iterator[Part]:
    for unit in engine.units:
        of = {binding.slot.index: binding for binding in unit.bindings}
        for store in unit.stores:
            for k in range(store.run.chunks):
                with engine.pool.guard(chunks_of(store, k), access):
                    yield from parts_of(store, k, of)


def parts_of(store: RunStore, k: int, of: Mapping[int, Binding]) -> Iterator[Part]:
    """The parts of one chunk, under a guard of it."""
    for segment in places_of(store.run, k):
        yield part_of(store, k, segment, of)


def part_of(store: RunStore, k: int, place: Segment, of: Mapping[int, Binding]) -> Part:
    """The part of one chunk at a place, under a guard of it."""
    part = slice(place.start, place.stop)
    planes = store.state(k, part) if store.states else ()
    return Part(of[place.slot.index], store.parameter(k)[part], planes, place.first)


def places_of(run: Run, k: int) -> Iterator[Segment]:
    """Where the parts of a chunk lie in it."""
    for segment in run.segments(k):
        for start in range(segment.start, segment.stop, PART):
            stop = min(start + PART, segment.stop)
            yield Segment(segment.slot, start, stop, segment.first + start - segment.start)
