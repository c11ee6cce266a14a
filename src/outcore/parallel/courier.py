"""A thread that runs collectives one after the other while the one that trains computes.

All ranks hand it the same ones in the same order, over connections that nobody else uses; so which thread comes first
on which rank does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Errand = tuple[Callable[[], None], "Future[None]"]


class Courier:
    """Starts with the first errand; ends with `close`, or with the process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, errand: Callable[[], None]) -> Future[None]:
        """Run an errand after those before it; what it raises comes with the future."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._queue,), name="outcore-gather", daemon=True
            )
            self._thread.start()
        future: Future[None] = Future()
        self._queue.put((errand, future))
        return future

    def close(self) -> None:
        """No more errands come."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None


def _run(queue: SimpleQueue[Errand | None]) -> None:
    while (found := queue.get()) is not None:
        errand, future = found
        try:
            errand()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del errand, future, found
