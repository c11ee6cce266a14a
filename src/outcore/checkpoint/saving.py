"""One save on its way to the disk, while training goes on or not.

[Note: Saving beside training]
`outcore.save` writes what is small (buffers, tensors of ``extra``, random number states) before it returns; what is
large lies in chunks, and only updates change chunks. A thread takes those that are as the step left them and on the
host. The others are brought there by the next step's updates and handed over then (copy before write, a note in
`outcore.optim.pipeline`): reading them for the save as well would cost as much again as writing it does. Only what
is not trained, and what no update has come for in `PATIENCE` (the run may be evaluating for an hour), does the thread
read by itself, and only where there is room that training has no use for sooner. Where nothing of the model was used
for as long, nobody trains and nobody may ever come by: then the thread does the updates that the save waits for, and
takes room from whatever is needed last, as any reader does. So a save always ends. The thread commits when all is
written. It makes the files durable too: training writes at most into the page cache. What goes wrong gives the save
up, and is raised where the run next comes by: at the next step, save, `wait` or `release`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from outcore.checkpoint import underway
from outcore.checkpoint.flow import Flow
from outcore.checkpoint.manifest import Manifest
from outcore.checkpoint.states import chunks_of
from outcore.checkpoint.writer import Writer
from outcore.chunks.pool import Access
from outcore.chunks.replacers import NEVER
from outcore.chunks.store import RunStore
from outcore.engine import Engine
from outcore.errors import CheckpointError
from outcore.memory.ledger import beside
from outcore.memory.refusal import typed
from outcore.optim.due import Update
from outcore.optim.preserver import Nobody
from outcore.trace.clock import Clock

WATCH = 0.5
"""Seconds after which the thread looks by itself whether there is something to write."""

PATIENCE = 10.0
"""Seconds without anything to write on the host after which the thread reads what it has yet to write."""

UNFORESEEN = NEVER - 1
"""Beside training the thread takes room from what is needed later, or what nobody knows a use of."""

ANYTHING = -1
"""Where nobody trains it takes room from whatever is needed last."""


class Rest:
    """Tells whether the model has been at rest for so long that nobody may come by."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = clock.count
        self._since = time.monotonic()

    def lasts(self) -> bool:
        """Whether nothing of the model was used in `PATIENCE`."""
        now = time.monotonic()
        if self._clock.count != self._count:
            self._count, self._since = self._clock.count, now
        return now - self._since >= PATIENCE


@dataclass(frozen=True)
class Job:
    """What a save needs until its end.

    Attributes:
        folder: closing it commits, leaving it with an error removes what was written.
        after: called once it is committed.
    """

    engine: Engine
    flow: Flow
    writer: Writer
    manifest: Manifest
    folder: ExitStack
    after: Callable[[], None]


class Saving:
    """A save that `outcore.save` began; see [Note: Saving beside training]. Is a `Preserver`.

    Attributes:
        path: where the checkpoint is once it is committed.
    """

    def __init__(self, path: Path, job: Job | None) -> None:
        self.path = path
        self._job: Job | None = job
        self._error: BaseException | None = None
        self._told = False
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._owner = threading.get_ident()
        self._thread: threading.Thread | None = None
        if job is None:  # it is over already
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether it has ended: the checkpoint is committed, or `wait` says why not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is committed. The thread that trains does what is left itself.

        Raises:
            DiskFullError, DiskWriteError: the system refused; there is nothing at the path. If that was while an old
                checkpoint of a series was removed, the new one is in place all the same.
            OutcoreError: what else kept it from being saved.
        """
        self.finish()
        if self._error is not None:
            self._told = True
            raise self._error

    # -- the two ways to do it ----------------------------------------------------------------------

    def go(self, wait: bool) -> Saving:
        """Do it in one of them, unless it is over."""
        if not self.done and wait:
            self.run()
        elif not self.done:
            self.start()
        return self

    def run(self) -> None:
        """Do all of it here.

        Raises:
            DiskFullError, DiskWriteError: as `wait`.
        """
        self._conclude(self._stream)
        cause = None if self._error is None else self._error.__cause__
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        self.wait()

    def start(self) -> None:
        """Let a thread do it."""
        job = self._job
        assert job is not None
        self._thread = threading.Thread(
            target=self._conclude, args=(self._stream_beside,), name="outcore-save", daemon=True
        )
        job.engine.updates.preserver = self
        underway.enter(self)
        try:
            self._thread.start()
        except BaseException as error:
            self._thread = None
            self._give_up(error)
            self._conclude(lambda: None)
            raise

    def _stream(self) -> None:
        """Write what is left, on the training thread."""
        job = self._job
        if job is None:
            return
        if job.flow.waits:
            job.engine.updates.finish()
        while (found := next(job.flow.left(), None)) is not None:
            with job.engine.pool.guard(chunks_of(*found), Access.READ):
                job.flow.write(*found)
            if self._thread is None:
                job.writer.settle()

    def _stream_beside(self) -> None:
        """Write what is left, beside the training thread."""
        job = self._job
        assert job is not None
        with beside():
            self._write_left(job)

    def _write_left(self, job: Job) -> None:
        """What is at hand first, and what only an update brings when that has come."""
        found_here, rest = time.monotonic(), Rest(job.engine.clock)
        while next(job.flow.left(), None) is not None:
            with self._changed:
                at_rest = rest.lasts()
                found, here = self._choose(job.flow, at_rest)
                now = time.monotonic()
                if here:
                    found_here = now
                elif found and found[0].run.trained and now - found_here < PATIENCE and not at_rest:
                    found = None
                if found is None:
                    self._changed.wait(WATCH)
                    continue
            self._write_beside(job, *found, ANYTHING if at_rest else UNFORESEEN)
            job.writer.settle()

    def _write_beside(self, job: Job, store: RunStore, k: int, beyond: int) -> None:
        def wanted() -> bool:
            return job.flow.next(store) == k

        update = job.flow.awaits(store, k)
        if update is not None:
            if update.error is not None:
                raise update.error
            job.engine.updates.do_beside(update, beyond)
            return
        guard = job.engine.pool.guard_if_room(chunks_of(store, k), (), wanted, beyond)
        if guard is not None:
            with guard:
                job.flow.write(store, k)

    def _choose(self, flow: Flow, at_rest: bool) -> tuple[tuple[RunStore, int] | None, bool]:
        """The chunk to write next, and whether it is on the host; else one that no update will bring."""
        found = [place for place in flow.left() if flow.awaits(*place) is None]
        if at_rest and not found:
            return next(flow.left(), None), False
        for place in found:
            if all(chunk.on_host for chunk in chunks_of(*place)):
                return place, True
        frozen = (place for place in found if not place[0].run.trained)
        return next(frozen, found[0] if found else None), False

    # -- the end ------------------------------------------------------------------------------------

    def _conclude(self, stream: Callable[[], None]) -> None:
        """Write, then commit, or leave nothing. Never raises."""
        job = self._job
        assert job is not None
        try:
            stream()
            if job.flow.failed is not None:  # whose thread may not have come to say so yet
                self._give_up(job.flow.failed)
            if self._error is None:
                job.writer.finish(job.manifest)
                job.folder.close()
                job.after()
        except BaseException as error:
            self._give_up(error)
        if self._error is not None:
            self._remove(job, self._error)
        elif job.engine.updates.preserver is self:
            job.engine.updates.preserver = Nobody()
        self._job = None
        underway.leave(self)
        self._over.set()

    def _remove(self, job: Job, error: BaseException) -> None:
        job.flow.drain()
        with suppress(BaseException), job.folder:
            raise error

    def _give_up(self, error: BaseException) -> None:
        job = self._job
        error = typed(error, f"the checkpoint {self.path}")
        if not isinstance(error, Exception):
            told = CheckpointError(f"{self.path} was not saved: {type(error).__name__} came in between")
            told.__cause__, error = error, told
        with self._changed:
            self._error = self._error or error
            if job is not None:
                job.flow.stop()
            self._changed.notify_all()

    # -- beside updates -----------------------------------------------------------------------------

    def is_ready(self, update: Update) -> bool:
        job = self._job
        return (
            job is None
            or job.flow.stopped
            or job.flow.precedes(update)
            or job.flow.next(update.store) >= update.k
        )

    def prepare(self, update: Update) -> None:
        job = self._job
        while job is not None and not self.is_ready(update):
            with self._giving_up():
                k = job.flow.next(update.store)
                with job.engine.pool.guard(chunks_of(update.store, k), Access.READ):
                    job.flow.write(update.store, k)

    def preserve(self, update: Update) -> None:
        job = self._job
        if job is not None and not job.flow.precedes(update):
            with self._giving_up():
                job.flow.write(update.store, update.k)

    def completed(self, update: Update) -> None:
        with self._changed:
            self._changed.notify_all()

    def finish(self, last: bool = False) -> None:
        if self.done or threading.current_thread() is self._thread:
            return
        if last or threading.get_ident() == self._owner:
            with self._giving_up():
                self._stream()
        self._over.wait()

    def report(self) -> None:
        if self._error is not None and not self._told and self.done:
            self._told = True
            raise self._error

    def _giving_up(self) -> _GivingUp:
        return _GivingUp(self._give_up)


class _GivingUp:
    """What is raised inside gives a save up; only what is no `Exception` goes on, since training does not mind."""

    def __init__(self, give_up: Callable[[BaseException], None]) -> None:
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._give_up(error)
        return isinstance(error, Exception)
