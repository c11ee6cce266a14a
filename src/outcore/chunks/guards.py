"""Guards: the only way to a chunk's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import TracebackType
from typing import Protocol

from outcore.chunks.chunk import Chunk


class Pins(Protocol):
    """Who keeps chunks in their place while they are guarded."""

    def unpin(self, chunks: Sequence[Chunk], beside: int = 0) -> None:
        """They may leave again. ``beside`` guards of other threads end with it."""


class Access(Enum):
    """What a guard may do with the bytes."""

    READ = "read"
    WRITE = "write"
    """Read and change them: the disk copy becomes stale."""
    FRESH = "fresh"
    """Overwrite all of them: what was there is not read back, and an empty chunk starts as zeros."""


class Guard:
    """Pins chunks while open. A context manager; closing twice is harmless."""

    def __init__(self, pool: Pins, chunks: Sequence[Chunk]) -> None:
        self._pool = pool
        self._chunks = chunks

    def close(self) -> None:
        chunks, self._chunks = self._chunks, ()
        if chunks:
            self._pool.unpin(chunks)

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SideGuard(Guard):
    """A guard of a thread beside the one that trains, which may wait for it."""

    def close(self) -> None:
        chunks, self._chunks = self._chunks, ()
        if chunks:
            self._pool.unpin(chunks, beside=1)
