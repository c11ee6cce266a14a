"""Checkpoints of several ranks: the files are those of one process, so any number of ranks loads them.

[Note: Who writes]
The first rank writes. The others hand it their slices in the order of the files, a part at a time, so that staging
takes what it takes on one rank and each tensor's digest is of its bytes in order. What fails on one rank alone is kept
until all is handed over; then all ranks hear of it, nothing is committed, and training can go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from outcore.checkpoint import rng, states
from outcore.checkpoint.states import PART, Sink
from outcore.checkpoint.values import decode, encode
from outcore.chunks.layout import Run, Segment
from outcore.chunks.pool import Access
from outcore.chunks.store import RunStore
from outcore.engine import Engine
from outcore.model.unit import Binding
from outcore.parallel.ranks import Ranks, World


class _Into:
    """Takes what one part has into a row of a buffer. Is a `Sink`."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def write(self, values: torch.Tensor) -> None:
        self._row.copy_(values)


class _Collection:
    """One save's way through all slices."""

    def __init__(
        self,
        engine: Engine,
        world: World,
        values: Mapping[str, Sink],
        moments: Mapping[str, Mapping[str, Sink]],
        with_moments: bool,
        what: str,
    ) -> None:
        self._engine = engine
        self._world = world
        self._values = values
        self._moments = moments
        self._with_moments = with_moments
        self._what = what
        self._staging = torch.empty(PART)
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self.faults: list[Exception] = []

    def run(self) -> None:
        for unit in self._engine.units:
            of = {binding.slot.index: binding for binding in unit.bindings}
            for store in unit.stores:
                whole = store.run.whole
                if whole is None:
                    self._slice(store, store.run, 0, of)
                    continue
                share = whole.share(self._world.slices.size)
                for rank in range(self._world.slices.size):
                    self._slice(store, whole.window(rank * share, (rank + 1) * share), rank, of)

    def _slice(self, store: RunStore, run: Run, rank: int, of: Mapping[int, Binding]) -> None:
        """Bring the slice of one rank, laid out as ``run``, to the first."""
        number, slices = self._world.number, self._world.slices
        if number not in (0, rank):  # of several replicas the first one is saved
            return
        for k in range(run.chunks):
            for place in states.places_of(run, k):
                binding = of[place.slot.index]
                table = self._table(binding, place.stop - place.start)
                if number == rank:
                    self._attempt(self._read, store, k, place, of, table)
                slices.hand(table, rank, 0, self._what)
                if number == 0:
                    self._attempt(self._write, binding, table)

    def _names(self, binding: Binding) -> tuple[str, ...]:
        return states.moment_names(self._engine, binding) if self._with_moments else ()

    def _table(self, binding: Binding, count: int) -> torch.Tensor:
        """A row for the value and one for each moment."""
        dtype, rows = states.full_dtype(binding), 1 + len(self._names(binding))
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < rows * count:
            buffer = self._buffers[dtype] = torch.zeros(rows * PART, dtype=dtype)
        return buffer[: rows * count].view(rows, count)

    def _read(
        self,
        store: RunStore,
        k: int,
        place: Segment,
        of: Mapping[int, Binding],
        table: torch.Tensor,
    ) -> None:
        with self._engine.pool.guard(states.chunks_of(store, k), Access.READ):
            part = states.part_of(store, k, place, of)
            names = self._names(part.binding)
            moments = {name: _Into(table[row]) for row, name in enumerate(names, start=1)}
            rule = self._engine.rule
            name = part.binding.name
            states.read_part(part, rule, {name: _Into(table[0])}, {name: moments}, self._staging)

    def _write(self, binding: Binding, table: torch.Tensor) -> None:
        self._values[binding.name].write(table[0])
        for row, name in enumerate(self._names(binding), start=1):
            self._moments[binding.name][name].write(table[row])

    def _attempt(self, work: Any, *arguments: Any) -> None:
        """Do what may fail here alone, unless something did."""
        if not self.faults:
            try:
                work(*arguments)
            except Exception as error:
                self.faults.append(error)


@torch.no_grad()
def collect(
    engine: Engine,
    values: Mapping[str, Sink],
    moments: Mapping[str, Mapping[str, Sink]],
    with_moments: bool,
    what: str,
) -> list[Exception]:
    """Stream all parameters to the first rank.

    Args:
        values, moments: where they go; used by the first rank alone.
        with_moments: whether moments go anywhere.

    Returns:
        What failed on this rank alone.
    """
    assert isinstance(engine.ranks, World)
    collection = _Collection(engine, engine.ranks, values, moments, with_moments, what)
    collection.run()
    return collection.faults


# -- random numbers -----------------------------------------------------------------------------------


def everyones_randoms(ranks: Ranks, what: str) -> dict[str, Any]:
    """The first rank's random number states, with those of the others under ``ranks``."""
    said = json.dumps(encode(rng.capture(), lambda tensor: json.dumps(tensor.tolist()), "random numbers"))
    first, *others = (_heard(words) for words in ranks.words(said.encode(), what))
    return {**first, "ranks": others}


def _heard(words: bytes) -> dict[str, Any]:
    found = decode(json.loads(words), lambda text: torch.tensor(json.loads(text), dtype=torch.uint8))
    assert isinstance(found, dict)
    return found


def own_randoms(states_of: Any, ranks: Ranks) -> Any:
    """Which of a checkpoint's states are this rank's: those of its number, or what it has now if there are none."""
    others = states_of.get("ranks", [])
    if ranks.number == 0:
        return states_of
    if (
        isinstance(others, list)
        and ranks.number <= len(others)
        and isinstance(others[ranks.number - 1], dict)
    ):
        return dict(others[ranks.number - 1])
    return rng.capture()
