"""A stream that may break without breaking the run."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO, Any


class Unfailing:
    """Writes on to a stream as long as that goes: a reader may go away, a disk may fill, a terminal may hang up.

    What is said then is lost, and nothing else: a run that ended over its own progress line would lose its work. The
    descriptor is pointed at the null device, so that what Python flushes at its end doesn't fail either.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or lose it."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """Flush, or lose it."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        with suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self._stream.fileno())
            finally:
                os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
