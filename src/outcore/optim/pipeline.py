"""Which chunk is updated when, with which numbers.

[Note: Off the critical path]
`step()` only notes what is due. A chunk is updated when its unit is next asked for, or before that by a thread of
its own (`outcore.optim.update_thread`), in the order in which forward needs the units; so the states cross
the disk while the model computes, and on an accelerator the update itself costs no time. All updates
are done before the first gradient of the next backward: so the gradients of one step alone are ever held.

Each update is a tick just before the use of its unit. One that was done ahead of its tick is *fulfilled*: the
schedule no longer foresees it, so that its states may leave at once. The ticks, and with them the schedule,
don't depend on how far ahead the thread was; nor does any result, because each element is updated once, from its
own gradient and state.

[Note: Copy before write]
A save under way needs each chunk as the step before left it. It goes through the chunks by itself; a chunk that it
has not come to is handed to it by whoever is about to update it, under the guards of the update, whose bytes are
at hand then. So an update never overtakes a save, and a save reads little of its own where memory is short. It
takes the chunks of a run in their order (a tensor's digest is of its bytes in order), which is that of the updates;
where an earlier chunk has no update in this step, it is handed over before anything of the update is guarded,
because whoever waits for another's chunk while holding one's own could wait for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack

import torch

from outcore.chunks.layout import Segment
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import NEVER
from outcore.chunks.store import RunStore
from outcore.memory.ledger import Ledger
from outcore.memory.refusal import allocating
from outcore.optim.due import Due, Progress, Update
from outcore.optim.gradients import Gradients
from outcore.optim.kernels import Master, Rule, Workers
from outcore.optim.preserver import Nobody, Preserver
from outcore.optim.update_thread import UpdateThread
from outcore.trace.clock import Clock


class Pipeline:
    """Applies a rule to every chunk that has gradients; see [Note: Off the critical path]. Is `Updates`.

    Args:
        ahead: whether a thread works ahead of the training thread.

    Attributes:
        preserver: who is asked before a chunk changes; see [Note: Copy before write].
    """

    def __init__(
        self,
        rule: Rule,
        stores: Iterable[RunStore],
        gradients: Gradients,
        pool: Pool,
        clock: Clock,
        ledger: Ledger,
        workers: Workers,
        ahead: bool,
    ) -> None:
        self._rule = rule
        self._stores = tuple(store for store in stores if store.run.trained)
        self._gradients = gradients
        self._pool = pool
        self._clock = clock
        self._ledger = ledger
        self._workers = workers
        self._updates: dict[RunStore, list[Update]] = {}
        self._changed = threading.Condition()
        self.preserver: Preserver = Nobody()
        self._thread = UpdateThread(self, pool) if ahead else None

    # -- what is due ------------------------------------------------------------------------------

    def begin(self, due: Due) -> Collection[RunStore]:
        """Take over the gradients of a step. Those of the step before are done first. Returns what will change."""
        self.finish()
        if self._thread is not None:
            self._thread.join()  # now: later it would find work, and wait for room that nobody makes meanwhile
        collected = self._gradients.take()
        found: dict[RunStore, list[Update]] = {}
        for store in self._stores:
            chunks = [k for k in range(store.run.chunks) if collected.has(store, k)]
            if chunks:
                found[store] = [Update(due, collected, store, k) for k in chunks]
        with self._changed:
            self._updates = found
        if self._thread is not None and found:
            self._thread.start()
        return found

    @property
    def outstanding(self) -> bool:
        return bool(self._updates)

    def is_due(self, stores: Iterable[RunStore]) -> bool:
        return any(not update.done for store in stores for update in self._updates.get(store, ()))

    def pending(self) -> Sequence[Update]:
        with self._changed:
            return [update for found in self._updates.values() for update in found if not update.done]

    def unclaimed(self) -> Update | None:
        """The first update that nobody does yet."""
        with self._changed:
            for updates in self._updates.values():
                for update in updates:
                    if update.progress is Progress.WAITING:
                        return update
        return None

    # -- doing it ---------------------------------------------------------------------------------

    def settle(self, stores: Iterable[RunStore]) -> None:
        for store in stores:
            if store in self._updates:
                self._settle(self._updates[store])
                with self._changed:
                    del self._updates[store]

    def finish(self) -> None:
        self.settle(tuple(self._updates))

    def close(self) -> None:
        """Forget what is due, and wait for what is being done."""
        self._forget()

    def forget(self) -> None:
        for updates in self._forget().values():
            for update in updates:
                if not update.done:
                    update.collected.discard(update.store, update.k)

    def _forget(self) -> dict[RunStore, list[Update]]:
        with self._changed:
            found, self._updates = self._updates, {}
        if self._thread is not None:
            self._thread.join()
        return found

    def _settle(self, updates: Sequence[Update]) -> None:
        """On the training thread: do what is left of a store's updates, wait for what others do."""
        start = time.perf_counter()
        waited = sum(self._ledger.snapshot().waited.values())
        for update in updates:
            if not update.ticked:  # just before it is done, or the schedule would let its states go
                with self._pool.lock:
                    update.ticked = True
                    self._clock.tick(update.key, (update.gradient, *update.written))
            self._try(update)
        while not all(update.done for update in updates):
            self._wait(updates)
            for update in updates:
                self._try(update)
        waited = sum(self._ledger.snapshot().waited.values()) - waited
        self._ledger.spent("update", time.perf_counter() - start - waited)

    def _try(self, update: Update) -> None:
        """Do an update unless somebody else does."""
        if not self.claim(update):
            return
        try:
            self.preserver.prepare(update)
            guards = ExitStack()
            with guards:
                guards.enter_context(self._pool.guard([update.gradient], Access.READ))
                guards.enter_context(self._pool.guard(update.written, Access.WRITE))
                self.preserver.preserve(update)
                held = guards.pop_all()
        except BaseException:
            self.unclaim(update)
            raise
        with held:
            self.apply(update)
        self.complete(update)

    def _wait(self, updates: Sequence[Update]) -> None:
        """Until something changed about an update that others do."""
        with self._changed:
            while not any(update.progress is Progress.WAITING for update in updates):
                for update in updates:
                    if update.error is not None:
                        raise update.error
                if all(update.done for update in updates):
                    return
                self._changed.wait()

    def claim(self, update: Update) -> bool:
        """Whether the caller is to do the update: nobody else does."""
        with self._changed:
            mine = update.progress is Progress.WAITING
            if mine:
                update.progress = Progress.CLAIMED
            return mine

    def do_beside(self, update: Update, beyond: int = NEVER) -> None:
        mine = False

        def claim() -> bool:  # whoever holds nothing else can't do what must come before the update
            nonlocal mine
            mine = self.preserver.is_ready(update) and self.claim(update)
            return mine

        guards = ExitStack()
        try:
            with guards:
                guard = self._pool.guard_if_room([update.gradient], update.written, claim, beyond)
                if guard is None:
                    return
                guards.enter_context(guard)
                self.preserver.preserve(update)
                held = guards.pop_all()
        except BaseException:
            if mine:
                self.unclaim(update)
            raise
        with held:
            self.apply(update)
        self._fulfil(update)
        self.complete(update)

    def unclaim(self, update: Update) -> None:
        """The update could not be begun: its bytes are as they were."""
        with self._changed:
            update.progress = Progress.WAITING
            self._changed.notify_all()

    def _fulfil(self, update: Update) -> None:
        """An update is done ahead of its tick. One that is past can't be meant: the next step's has the same key."""
        with self._pool.lock:
            if not update.ticked:
                self._clock.fulfil(update.key)

    def complete(self, update: Update) -> None:
        """The update is done and nobody holds its chunks any more."""
        update.collected.discard(update.store, update.k)
        with self._changed:
            update.progress = Progress.DONE
            self._changed.notify_all()
        self.preserver.completed(update)

    def apply(self, update: Update) -> None:
        """The arithmetic, under guards of the chunks."""
        store, k = update.store, update.k
        parameter, values = store.parameter(k), update.collected.values(store, k)
        try:
            name = store.parameters[k].name
            with self._ledger.doing("update", name), allocating(f"the update of {name}"):
                for segment in store.run.segments(k):
                    if segment.slot.index in update.collected.present:
                        planes = store.state(k, slice(segment.start, segment.stop))
                        self._apply(update.due, segment, parameter, values, planes)
        except BaseException as error:
            with self._changed:
                update.progress, update.error = Progress.FAILED, error
                self._changed.notify_all()
            raise

    def _apply(
        self,
        due: Due,
        segment: Segment,
        parameter: torch.Tensor,
        values: torch.Tensor,
        planes: tuple[torch.Tensor, ...],
    ) -> None:
        part = slice(segment.start, segment.stop)
        index = segment.slot.index
        self._rule.update(
            parameter[part],
            values[part],
            planes,
            hyper=due.hyper[due.group_of[index]],
            step=due.steps[index],
            transform=due.transform,
            workers=self._workers,
            slot=segment.slot,
        )


def master_kind(rule: Rule, dtype: torch.dtype) -> Master:
    """Where the fp32 master of a parameter of this dtype lives."""
    if dtype is torch.float32:
        return Master.NONE
    if dtype is torch.bfloat16 and rule.can_split:
        return Master.SPLIT
    return Master.FULL
