"""Threads of our own for the update, apart from torch's, which are busy with the model."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from outcore.errors import UsageError
from outcore.memory import cores

GRAIN = 1 << 18
"""Elements a thread takes at a time: some 4 MiB of states, a fraction of a millisecond."""


class Workers:
    """Runs a task over a range, piece by piece, on several threads at once.

    The caller's thread works too, so a pool that is busy for others slows a call down but never blocks it.
    Safe to use from several threads. A task must not call `run` of the same pool and must release the GIL to
    gain anything.

    Args:
        threads: how many threads work on one call, the caller's included.

    Raises:
        UsageError: ``threads`` is not positive.
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise UsageError(f"an update needs at least 1 thread, not {threads}")
        self.threads = threads
        self._pool = ThreadPoolExecutor(
            max(threads - 1, 1), thread_name_prefix="outcore-update", initializer=cores.keep_to_node
        )

    def run(self, task: Callable[[int, int], object], n: int, grain: int = GRAIN) -> None:
        """Call ``task(start, stop)`` for pieces that cover [0, n); return when all are done.

        Args:
            task: does one piece; pieces run in any order and at the same time.
            n: length of the range.
            grain: length of a piece; starts are multiples of it.

        Raises:
            Exception: what a task raised. Other pieces may be done or not.
        """
        pieces = -(-n // grain)
        helpers = min(self.threads, pieces) - 1
        if helpers < 1:
            if n > 0:
                task(0, n)
            return
        numbers = itertools.count()

        def work() -> None:
            while (piece := next(numbers)) < pieces:
                task(piece * grain, min((piece + 1) * grain, n))

        others = [self._pool.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            # a helper that has not begun finds nothing left to do; the others still hold the arrays
            running = [other for other in others if not other.cancel()]
            failures = [failure for other in running if (failure := other.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def workers() -> Workers:
    """The pool used where none is given, of the threads that `outcore.memory.cores` gives updates."""
    return Workers(cores.ours().for_updates(torch.get_num_threads()))


# threads don't survive a fork
os.register_at_fork(after_in_child=workers.cache_clear)
