"""SIGINT and SIGTERM without a torn run.

[Note: Where a run may stop]
Python raises KeyboardInterrupt between any two instructions of the main thread, also where a chunk is half way
between two states, and closing would then wait for a transfer that was never started. So the first signal is
only noted, and honoured where everything is at rest: between two steps, or two passes of the model. A second one
ends the process at once, as does the end of the grace: the disk tier's files have no names and an uncommitted
checkpoint is swept by the next run, so nothing is lost then either.

[Note: Who sees a signal]
A Python handler runs in the main thread between two instructions, and a backward pass may be one instruction of
minutes. So the system's handler also writes each signal into a pipe (`signal.set_wakeup_fd`), and a thread reads
it there: a second signal and the end of the grace need no main thread.

[Note: Workers]
A terminal sends its signal to the whole process group, and a data loader's worker that dies of it takes the step
down that was to be finished. So a child that is forked meanwhile gets a group of its own and the handlers of before:
what is sent to the group reaches the parent alone, what is sent to the child means the child.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from outcore.errors import UsageError

GRACE = 300.0
"""Seconds that a run has, from the signal on, to finish its step and save."""

ECHO = 0.5
"""Seconds in which another SIGTERM is the same one: who stops a job signals its processes, and a launcher among them
passes it on. At a terminal it is SIGINT, and there a second one is meant."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_current: Interrupts | None = None


class Interrupts:
    """While it is entered, SIGINT and SIGTERM ask the loop to stop, which does so when a step is over.

    ::

        with outcore.Interrupts(grace=120) as interrupts:
            for step in range(first, steps):
                ...
                if interrupts.asked:
                    checkpoints.save(step, model, optimizer, extra=...)
                    break

    A second signal ends the process at once (a SIGTERM right after another is taken for the same), and so does the end
    of the grace, with exit code 130 (SIGINT) or 143 (SIGTERM). Once there was a signal it stays in charge after the
    block, until the process ends. Workers that are forked meanwhile are not reached by a signal to the process group.
    Outside the main thread it does nothing.

    Args:
        grace: seconds from the first signal to the end of the process at the latest; ``None`` for no end.
        ending: what is waited for after the first signal, for the message.

    Attributes:
        hint: what else to say when the process is ended.

    Raises:
        UsageError: the grace is not above 0.
    """

    def __init__(self, grace: float | None = GRACE, ending: str = "this step") -> None:
        if grace is not None and not (grace > 0 and math.isfinite(grace)):
            raise UsageError(f"the grace must be above 0 seconds, and is {grace}")
        self.hint = ""
        self._grace = grace
        self._ending = ending
        self._asked = 0
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup = -1
        self._write = -1
        self._said = threading.Event()

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked != 0

    @property
    def code(self) -> int:
        """The exit code that tells of the signal: 130 or 143; 0 if none has come."""
        return 128 + self._asked if self._asked else 0

    def check(self) -> None:
        """Stop here if a signal has come; between two passes of the model this is safe.

        Raises:
            KeyboardInterrupt: one has; its argument is the signal's number.
        """
        if self._asked:
            raise KeyboardInterrupt(self._asked)

    def __enter__(self) -> Interrupts:
        global _current
        if threading.current_thread() is threading.main_thread():
            read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._noted) for number in SIGNALS}
            threading.Thread(target=self._watch, args=(read,), name="outcore-interrupts", daemon=True).start()
            _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._asked:
            self._said.wait(10)  # for its thread, which may wait for a core
        else:
            self.close()

    def close(self) -> None:
        """Give the signals back to whom they belonged before. The process may then live on."""
        global _current
        if self._write >= 0:
            for number, before in self._before.items():
                signal.signal(number, before)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._write)  # the thread reads the end of the pipe
            self._write = -1
            _current = None

    def _noted(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number

    def _watch(self, read: int) -> None:
        end: float | None = None
        asked = -math.inf
        selector = selectors.PollSelector()  # select() knows no descriptor above 1023
        selector.register(read, selectors.EVENT_READ)
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not selector.select(left):
                self._leave(self._asked, f"the grace of {self._grace:g} s is over")
            got = os.read(read, 1)
            if not got:
                os.close(read)
                return
            if got[0] not in SIGNALS:
                continue
            name = signal.Signals(got[0]).name
            if self._said.is_set():
                if got[0] == signal.SIGTERM and time.monotonic() - asked < ECHO:
                    continue
                self._leave(got[0], f"{name} again: stopped at once")
            self._asked, asked = self._asked or got[0], time.monotonic()
            if self._grace is not None:
                end = asked + self._grace
            within = "" if self._grace is None else f" within {self._grace:g} s"
            _say(f"{name}: stopping at the end of {self._ending}{within}; once more to stop at once")
            self._said.set()

    def _leave(self, number: int, why: str) -> None:
        if sys.stdout.isatty():
            _write(sys.stdout.fileno(), "\x1b[?25h\n")  # a progress bar had hidden the cursor
        _say(f"{why}{'; ' if self.hint else ''}{self.hint}")
        os._exit(128 + number)

    def _in_worker(self) -> None:
        """In a child, right after the fork."""
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.setpgid(0, 0)


def _say(text: str) -> None:
    _write(2, f"outcore: {text}\n")


def _write(descriptor: int, text: str) -> None:
    """Past `print`, which may be at work in the main thread. Nobody may be there to read it any more."""
    with suppress(OSError):
        os.write(descriptor, text.encode())


def _after_fork() -> None:
    if _current is not None:
        _current._in_worker()


_register: Callable[..., None] | None = getattr(os, "register_at_fork", None)
if _register is not None:
    _register(after_in_child=_after_fork)
