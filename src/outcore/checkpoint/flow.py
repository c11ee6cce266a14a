"""What of a save is still to be written, chunk by chunk and by any thread.

[Note: Who waits for a chunk]
A chunk is guarded first and its run locked then. Whoever holds the lock of a run does nothing but write to files, so
he ends; whoever waits for room in the pool holds no lock. Two threads may guard the same chunk: the second one
finds it written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from outcore.checkpoint import states
from outcore.checkpoint.states import Sink
from outcore.chunks.store import RunStore
from outcore.engine import Engine
from outcore.model.unit import Binding
from outcore.optim.due import Update


@dataclass(eq=False)
class Lane:
    """One run's part of a save, written from its first chunk to its last.

    Attributes:
        of: the run's parameters by number.
        next: the first chunk that is not written yet; only grows, under the lock.
    """

    store: RunStore
    of: Mapping[int, Binding]
    next: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Flow:
    """All runs of a model on their way to a checkpoint's files.

    Args:
        values: where each parameter goes, by name.
        moments: where its moments go.
        pending: the updates that come before the save and were not done when it began.

    Attributes:
        failed: what kept a chunk from being written to its end; nothing is written after that.
    """

    def __init__(
        self,
        engine: Engine,
        values: Mapping[str, Sink],
        moments: Mapping[str, Mapping[str, Sink]],
        pending: Iterable[Update],
    ) -> None:
        self._rule = engine.rule
        self._values = values
        self._moments = moments
        self._pending = {(update.store, update.k): update for update in pending}
        self._lanes = {
            store: Lane(store, {b.slot.index: b for b in unit.bindings})
            for unit in engine.units
            for store in unit.stores
        }
        self._stopped = False
        self.failed: BaseException | None = None

    def precedes(self, update: Update) -> bool:
        """Whether an update belongs to what is saved: then it comes before its chunk is written."""
        return self._pending.get((update.store, update.k)) is update

    @property
    def waits(self) -> bool:
        """Whether an update that belongs to what is saved is not done."""
        return not all(update.done for update in self._pending.values())

    def next(self, store: RunStore) -> int:
        """The first chunk of a run that is not written."""
        return self._lanes[store].next

    def left(self) -> Iterator[tuple[RunStore, int]]:
        """The first chunk of each run that is not written, in the order of updates."""
        for lane in self._lanes.values():
            k = lane.next
            if k < lane.store.run.chunks and not self._stopped:
                yield lane.store, k

    def awaits(self, store: RunStore, k: int) -> Update | None:
        """The update that a chunk is to be saved after, if it is not done yet."""
        update = self._pending.get((store, k))
        return None if update is None or update.done else update

    def write(self, store: RunStore, k: int) -> None:
        """Write a chunk that is guarded, unless it was or the save was given up; the run's earlier ones were.

        Raises:
            DiskFullError, DiskWriteError: the system refused.
        """
        lane = self._lanes[store]
        with lane.lock:
            if lane.next != k or self._stopped:
                return
            try:
                states.read_chunk(store, k, lane.of, self._rule, self._values, self._moments)
            except BaseException as error:  # what was written in part is not begun again by the next to come
                self.failed = error
                self._stopped = True
                raise
            lane.next = k + 1

    @property
    def stopped(self) -> bool:
        """Whether nothing is written any more."""
        return self._stopped

    def stop(self) -> None:
        """Write nothing any more."""
        self._stopped = True

    def drain(self) -> None:
        """After `stop`: wait until nobody is writing."""
        for lane in self._lanes.values():
            with lane.lock:
                pass
