"""Where the values come from that are lifted to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from outcore.chunks.pool import Access, Pool
from outcore.chunks.store import RunStore
from outcore.model.gathering import Gathering
from outcore.model.host_frames import HostFrames
from outcore.model.unit import Unit
from outcore.optim.updates import Updates


class Held(Protocol):
    """Keeps bytes where they are."""

    def close(self) -> None:
        """They may go."""


@dataclass(frozen=True)
class Piece:
    """Some of a run's values on the host, to be copied in one go.

    Attributes:
        store: the run.
        start, stop: first and one past the last element within the whole run.
        name: for reports.
        take: brings the values, shape [stop - start], and keeps them until what it gives with them is closed.
    """

    store: RunStore
    start: int
    stop: int
    name: str
    take: Callable[[], tuple[torch.Tensor, Held]]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.store.run.dtype.itemsize


class Supply(Protocol):
    """Brings the values of units to the host.

    Attributes:
        lasting: they can be lifted again after a use, so their place on the device may be taken or kept at will.
    """

    lasting: bool

    def open(self, unit: Unit) -> None:
        """A unit is about to be used."""

    def ready(self, unit: Unit) -> bool:
        """Whether `pieces` would wait for nothing."""

    def pieces(self, unit: Unit) -> Iterator[Piece]:
        """All values of a unit."""

    def lifted(self, unit: Unit) -> None:
        """The unit is open on the device, and stays there until it is closed."""

    def close(self, unit: Unit) -> None:
        """The use is over."""

    def changed(self, unit: Unit) -> None:
        """The unit's values are about to be others."""

    def shut(self) -> None:
        """The end."""


class Chunks:
    """The whole of each run is kept here, in chunks. Implements `Supply`."""

    lasting = True

    def __init__(self, pool: Pool, updates: Updates) -> None:
        self._pool = pool
        self._updates = updates

    def open(self, unit: Unit) -> None:
        pass

    def ready(self, unit: Unit) -> bool:
        return not self._updates.is_due(unit.stores) and all(c.ready for c in unit.parameter_chunks)

    def pieces(self, unit: Unit) -> Iterator[Piece]:
        for store in unit.stores:
            for k in range(store.run.chunks):
                start, stop = store.run.extent(k)
                yield Piece(store, start, stop, store.parameters[k].name, partial(self._take, store, k))

    def _take(self, store: RunStore, k: int) -> tuple[torch.Tensor, Held]:
        guard = self._pool.guard([store.parameters[k]], Access.READ)
        return store.parameter(k), guard

    def lifted(self, unit: Unit) -> None:
        pass

    def close(self, unit: Unit) -> None:
        pass

    def changed(self, unit: Unit) -> None:
        pass

    def shut(self) -> None:
        pass


class Gathered:
    """Ranks keep slices, which are gathered on the host. Implements `Supply`.

    Args:
        lasting: gathered once a step, not for each use.
    """

    def __init__(self, gathering: Gathering, frames: HostFrames, lasting: bool) -> None:
        self.lasting = lasting
        self._gathering = gathering
        self._frames = frames

    def open(self, unit: Unit) -> None:
        self._gathering.open(unit)

    def ready(self, unit: Unit) -> bool:
        return self._gathering.has(unit)

    def pieces(self, unit: Unit) -> Iterator[Piece]:
        for store in unit.stores:
            name = f"{store.name} gathered"
            yield Piece(store, 0, store.run.entire.numel, name, partial(self._take, unit, store))

    def _take(self, unit: Unit, store: RunStore) -> tuple[torch.Tensor, Held]:
        return self._frames.flat(store), self._frames.lend(unit)

    def lifted(self, unit: Unit) -> None:
        if not self.lasting:
            self._frames.give_back(unit)

    def close(self, unit: Unit) -> None:
        if not self.lasting:
            self._gathering.leave(unit)

    def changed(self, unit: Unit) -> None:
        self._gathering.leave(unit)

    def shut(self) -> None:
        self._gathering.shut()
