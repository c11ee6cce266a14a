"""Ctrl-C without a torn run.

[Note: Where a run may stop]
Python raises KeyboardInterrupt between any two instructions of the main thread, also where a chunk is half way
between two states, and closing would then wait for a transfer that was never started. So the first Ctrl-C is
only noted, and raised between two passes of the model, where everything is at rest. A second one ends the
process at once: the disk tier's files have no names, so nothing is left behind then either.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from outcore.cli.failures import INTERRUPTED


class Interrupts:
    """While it is entered, in the main thread, Ctrl-C waits for the next `check`.

    Once there was one, it stays in charge: another may come while the run is closing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._noted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None and not self._asked:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Stop here if the user has asked for it.

        Raises:
            KeyboardInterrupt: they have.
        """
        if self._asked:
            raise KeyboardInterrupt

    def _noted(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the progress bar had hidden the cursor
            os._exit(INTERRUPTED)
        self._asked = True
        os.write(
            2, b"outcore: stopping at the end of this pass; once more to stop at once\n"
        )  # print may be at work
