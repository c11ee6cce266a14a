"""Saves of this process that are not committed yet: those who read a path wait for its save, and so does the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Protocol

from outcore.errors import OutcoreError
from outcore.memory import ending


class Underway(Protocol):
    """A save that is not committed yet."""

    @property
    def path(self) -> Path:
        """Where it will be."""

    def finish(self, last: bool = False) -> None:
        """Wait for its end. ``last``: nobody trains any more, whoever calls this may do what is left."""

    def report(self) -> None:
        """Raise what went wrong, unless it was raised before."""


_saves: dict[Underway, int] = {}
"""With the process that began them: a child that was forked meanwhile has nothing to do with them."""


def enter(save: Underway) -> None:
    """A save begins."""
    _saves[save] = os.getpid()


def leave(save: Underway) -> None:
    """A save has ended, one way or the other."""
    _saves.pop(save, None)


def wait_for(path: Path) -> None:
    """Wait for the end of a save to this path, if there is one. What went wrong is not raised here."""
    path = path.absolute()
    for save in _ours():
        if save.path == path:
            save.finish()


def _ours() -> list[Underway]:
    return [save for save, process in list(_saves.items()) if process == os.getpid()]


def _end() -> None:
    for save in _ours():
        try:
            save.finish(last=True)
            save.report()
        except OutcoreError as error:
            print(f"outcore: error: {error}", file=sys.stderr)


ending.before(_end)
