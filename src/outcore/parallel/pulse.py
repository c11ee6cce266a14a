"""Signs of life of a rank that works by itself, for those that wait for it.

[Note: Late is not gone]
What a rank does by itself between two agreements may take longer than ranks are waited for: one reads a whole
checkpoint and compares its digests, removes another, or has the slowest disk. So while it works a thread agrees with
the others every second that somebody is at work, and each wait is a short one. A rank that ends takes its connections
along and is missed at once, by those who wait and by the threads of those who work; one that falls silent, after the
time-out. Only what hangs inside of such work, a disk that never answers, is waited for without end, as one process
waits for it.

That thread waits for the others while the rank works, which is no time that the rank lost: only what is left of a sign
when the work is over is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType

EVERY = 1.0
"""Seconds between two signs."""


class Pulse:
    """Gives signs of life inside a block.

    Args:
        sign: gives one, and waits until all others gave one or are done.
        timeout: seconds after which a rank without any is given up.
        waiting: what is entered while the rank waits for the others.

    Attributes:
        heard: what a sign raised: the others have parted. Nothing more is said then.
    """

    def __init__(
        self, sign: Callable[[], object], timeout: float, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._sign = sign
        self._waiting = waiting
        self._every = min(EVERY, timeout / 4)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outcore-pulse", daemon=True)
        self.heard: Exception | None = None

    def _run(self) -> None:
        try:
            while not self._over.wait(self._every):
                self._sign()
        except Exception as error:
            self.heard = error

    def __enter__(self) -> Pulse:
        with suppress(
            RuntimeError
        ):  # no thread can be started: then this rank has as long as it has elsewhere
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if (
            kind is None and self._thread.ident is not None
        ):  # else others may never come for the sign it is at
            with self._waiting():
                self._thread.join()
