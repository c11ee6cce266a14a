"""A thread that does updates ahead of the training thread, as far as there is room for their chunks.

It lives from a step until nothing is left to do, and knows its pipeline only weakly: a model that is
dropped in between takes everything with it.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from outcore.chunks.pool import Pool
from outcore.memory import cores
from outcore.memory.ledger import beside

if TYPE_CHECKING:
    from outcore.optim.pipeline import Pipeline


class UpdateThread:
    """Starts and ends the thread of one pipeline."""

    def __init__(self, pipeline: Pipeline, pool: Pool) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._pool = pool
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Work on what the pipeline has now. The thread before has been joined."""
        assert self._thread is None
        self._thread = threading.Thread(
            target=_work, args=(self._pipeline,), name="outcore-update", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of what it does; there must be nothing left to begin."""
        if self._thread is not None:
            self._pool.wake()
            self._thread.join()
            self._thread = None


def _work(reference: weakref.ref[Pipeline]) -> None:
    cores.keep_to_node()
    with beside():
        while (pipeline := reference()) is not None and (update := pipeline.unclaimed()) is not None:
            try:
                pipeline.do_beside(update)
            except BaseException:
                return  # the training thread will meet it, or finds it kept, and it is there that it is raised
            del pipeline
