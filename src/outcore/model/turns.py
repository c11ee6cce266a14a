"""Whose turn it is: one outermost forward at a time, on whichever thread.

[Note: Turns]
A unit's parameters are there for one forward's calls, so a second thread that calls the model waits until the first
has left it. A forward that Ctrl-C ended leaves without a word; so what holds the turn is its frame, and a frame that is
on no thread's stack holds nothing. A forward that waits for another thread which calls a part of the same model would
wait for ever: where no unit is used for long, the one that waits raises.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from outcore.errors import StateError

PATIENCE = 300.0
"""Seconds without any use of a unit after which one that waits gives up."""

LOOK = 0.5
"""Seconds after which one that waits looks whether the forward before it still runs."""


class Turn:
    """Held by the frame in which an outermost forward runs.

    Args:
        count: what grows as units are used.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._holder: FrameType | None = None

    def is_within(self, frame: FrameType) -> bool:
        """Whether a frame of this thread runs within the forward that holds the turn."""
        return self._holder is not None and _reaches(frame, self._holder)

    def is_held(self) -> bool:
        """Whether a forward runs, on whichever thread."""
        return self._holder is not None and _is_running(self._holder)

    def take(self, frame: FrameType) -> None:
        """Wait for the turn, and hold it.

        Raises:
            StateError: another thread's forward doesn't come to its end.
        """
        with self._changed:
            counted, since = -1, 0.0
            while self.is_held():
                self._changed.wait(LOOK)
                now = time.monotonic()
                if counted != self._count():
                    counted, since = self._count(), now
                elif now - since > PATIENCE:
                    raise StateError(
                        "this model is called on a thread while its forward on another one stands still: forwards of "
                        "one offloaded model run one after the other, so one may not wait for another's thread"
                    )
            self._holder = frame

    def give(self, frame: FrameType) -> bool:
        """The call that a frame runs, or that caught what it raised, is over. Returns whether it held the turn."""
        holder = self._holder
        if holder is None or (frame is not holder and frame is not holder.f_back):
            return False
        with self._changed:
            self._holder = None
            self._changed.notify()
        return True

    def drop(self) -> None:
        """Nothing runs any more: keep no frame."""
        self._holder = None


def _is_running(frame: FrameType) -> bool:
    return any(_reaches(top, frame) for top in sys._current_frames().values())


def _reaches(top: FrameType | None, frame: FrameType) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None
