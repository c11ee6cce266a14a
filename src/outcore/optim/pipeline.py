"""The order of updates: which chunk is updated when, with which numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.layout import Segment
from outcore.chunks.pool import Access, Pool
from outcore.chunks.store import RunStore
from outcore.memory.ledger import Ledger
from outcore.optim.gradients import Gradients
from outcore.optim.kernels import GradTransform, Master, Rule, Workers
from outcore.trace.clock import Clock

UPDATE_LAP = ("update",)


@dataclass(frozen=True)
class Due:
    """One optimizer step as it was called: later changes of a learning rate do not reach it.

    Attributes:
        hyper: the parameter groups' hyperparameters at the call.
        group_of: parameter index to group number.
        steps: parameter index to the number of its step, counted from 1.
        transform: unscaling and clipping, applied to each gradient as it is used.
    """

    hyper: Sequence[Mapping[str, object]]
    group_of: Mapping[int, int]
    steps: Mapping[int, int]
    transform: GradTransform = field(default_factory=GradTransform)


class Pipeline:
    """Applies a rule to every chunk that has gradients, in the order in which forward needs them."""

    def __init__(
        self,
        rule: Rule,
        stores: Iterable[RunStore],
        gradients: Gradients,
        pool: Pool,
        clock: Clock,
        ledger: Ledger,
        workers: Workers,
    ) -> None:
        self._rule = rule
        self._stores = tuple(store for store in stores if store.run.trained)
        self._gradients = gradients
        self._pool = pool
        self._clock = clock
        self._ledger = ledger
        self._workers = workers

    def run(self, due: Due) -> None:
        """Update all chunks and forget the gradients."""
        start = time.perf_counter()
        waited = sum(self._ledger.snapshot().waited.values())
        self._clock.lap(UPDATE_LAP)
        for store in self._stores:
            for k in range(store.run.chunks):
                if self._gradients.begun(store, k):
                    self._update(due, store, k)
                    self._gradients.discard(store, k)
        self._gradients.clear()
        waited = sum(self._ledger.snapshot().waited.values()) - waited
        self._ledger.spent("update", time.perf_counter() - start - waited)

    def _update(self, due: Due, store: RunStore, k: int) -> None:
        gradient = self._gradients.chunk(store, k)
        written = needs(store, k)
        self._clock.tick(("update", store.name, k), (gradient, *written))
        with (
            self._pool.guard([gradient], Access.READ),
            self._pool.guard(written, Access.WRITE),
            self._ledger.doing("update", written[0].name),
        ):
            parameter, values, planes = store.parameter(k), self._gradients.values(store, k), store.state(k)
            for segment in store.run.segments(k):
                if self._gradients.present(segment.slot):
                    self._apply(due, segment, parameter, values, planes)

    def _apply(
        self,
        due: Due,
        segment: Segment,
        parameter: torch.Tensor,
        values: torch.Tensor,
        planes: Sequence[torch.Tensor],
    ) -> None:
        part = slice(segment.start, segment.stop)
        index = segment.slot.index
        self._rule.update(
            parameter[part],
            values[part],
            tuple(plane[part] for plane in planes),
            hyper=due.hyper[due.group_of[index]],
            step=due.steps[index],
            transform=due.transform,
            workers=self._workers,
            slot=segment.slot,
        )


def needs(store: RunStore, k: int) -> tuple[Chunk, ...]:
    """The chunks that an update of chunk ``k`` writes."""
    return (store.parameters[k], *store.states[k : k + 1])


def master_kind(rule: Rule, dtype: torch.dtype) -> Master:
    """Where the fp32 master of a parameter of this dtype lives."""
    if dtype is torch.float32:
        return Master.NONE
    if dtype is torch.bfloat16 and rule.can_split:
        return Master.SPLIT
    return Master.FULL
