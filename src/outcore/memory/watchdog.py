"""Says what everything waits for when nothing moves for long: a disk that hangs is silent otherwise."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

STALLED = 60.0
"""Seconds without any transfer ending after which a wait is reported, and again after each as many."""


class Clock:
    """Time and waiting; tests put another in its place, so that none of them sleeps."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def wait(self, wait: Callable[[float], bool], seconds: float) -> bool:
        """Wait for a notification for so many seconds; whether one came."""
        return wait(seconds)


CLOCK = Clock()
"""Looked up at each wait."""


class Watchdog(threading.Condition):
    """A condition whose waits without a limit warn when they last: nobody notified, so no transfer has ended.

    Args:
        lock: of the condition.
        stalled: what is waited for, in words; nothing if there is nothing to report. Called under the lock.
    """

    def __init__(self, lock: threading.RLock, stalled: Callable[[], str]) -> None:
        super().__init__(lock)
        self._stalled = stalled

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        since = CLOCK.now()
        while not CLOCK.wait(super().wait, STALLED):
            what = self._stalled()
            if what:
                warnings.warn(
                    f"nothing has moved for {CLOCK.now() - since:.0f} s: everything waits for {what}; the disk or its "
                    "driver hangs, or is very slow",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return True
