"""What still has threads when the process ends is shut first.

A thread that the interpreter's end meets inside compiled code (a kernel, an operator of torch) is unwound from
there, and that aborts the process: a script whose last line is ``optimizer.step()`` would end with a core dump
while its last updates run.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Shutable(Protocol):
    """Something that owns threads."""

    def shut(self) -> None:
        """End them, and wait for what they are in the middle of."""


_open: weakref.WeakKeyDictionary[Shutable, int] = weakref.WeakKeyDictionary()
"""With the process that made them: their threads do not exist in a child that was forked meanwhile."""


_first: list[Callable[[], None]] = []


def before(end: Callable[[], None]) -> None:
    """When the process ends, call this before anything is shut: it needs what is open then."""
    _first.append(end)


def enter(owner: Shutable) -> None:
    """Shut it when the process ends, unless it is gone or left by then."""
    _open[owner] = os.getpid()


def leave(owner: Shutable) -> None:
    """It has been shut."""
    _open.pop(owner, None)


def _end() -> None:
    try:
        for end in _first:
            end()
    finally:
        for owner, process in list(_open.items()):
            if process == os.getpid():
                with suppress(Exception):  # nobody is left to tell, and the others must be shut too
                    owner.shut()


atexit.register(_end)
