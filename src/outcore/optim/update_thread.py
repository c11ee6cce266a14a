"""A thread that does updates ahead of the training thread, as far as there is room for their chunks.

It lives from a step until nothing is left to do, and knows its pipeline only weakly: a model that is
dropped in between takes everything with it.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from outcore.chunks.pool import Pool
from outcore.errors import OutcoreError
from outcore.trace.clock import Clock

if TYPE_CHECKING:
    from outcore.optim.pipeline import Pipeline


class UpdateThread:
    """Starts and ends the thread of one pipeline."""

    def __init__(self, pipeline: Pipeline, pool: Pool, clock: Clock) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._pool = pool
        self._clock = clock
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Work on what the pipeline has now. The thread before has been joined."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=_work, args=(self._pipeline, self._pool, self._clock), name="outcore-update", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of what it does; there must be nothing left to begin."""
        if self._thread is not None:
            self._pool.wake()
            self._thread.join()
            self._thread = None


def _work(reference: weakref.ref[Pipeline], pool: Pool, clock: Clock) -> None:
    while (pipeline := reference()) is not None and (update := pipeline.unclaimed()) is not None:
        claim = partial(pipeline.claim_ahead, update)
        try:
            guard = pool.guard_if_room([update.gradient], update.written, claim)
        except OutcoreError:
            pipeline.unclaim(update)
            return  # the training thread will meet it, and it is there that it is raised
        if guard is not None:
            try:
                with guard:
                    pipeline.preserver.preserve(update)
                    pipeline.apply(update)
            except BaseException:
                return  # the pipeline keeps it for the training thread
            clock.fulfil(update.key)
            pipeline.complete(update)
        del pipeline, claim
