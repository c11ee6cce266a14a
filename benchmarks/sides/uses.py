"""The order in which a pool's chunks are used in one step, written down from a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outcore.chunks.chunk import Chunk
from outcore.chunks.pool import Access, Pool


@dataclass(eq=False)
class Use:
    """A chunk is pinned from one moment to another.

    Attributes:
        reads: its bytes are needed as they were.
        writes: what is on disk is stale afterwards.
        last: its bytes are worth nothing after it.
    """

    chunk: Chunk
    start: int
    stop: int = -1
    reads: bool = False
    writes: bool = False
    last: bool = False


@dataclass
class Order:
    """What happened between two calls of ``step()``; moments are numbers from 0 on.

    Attributes:
        room: bytes that chunks may take at each moment, of the budget.
        moved: bytes by link and kind of chunk.
    """

    uses: list[Use] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    moved: dict[tuple[str, str], int] = field(default_factory=dict)


class Recorder:
    """Looks on at a pool's guards. Everything is noted under the pool's lock."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._open: dict[Chunk, Use] = {}
        self._latest: dict[Chunk, Use] = {}
        self._borrowed = 0
        self.order = Order()
        self._wrap()

    def take(self) -> Order:
        """What was written down since this was last called."""
        with self._pool.lock:
            done, self.order = self.order, Order()
            for use in self._open.values():
                use.stop = len(done.room)
            self._open = {chunk: self._begin(chunk) for chunk in self._open}
            self._latest.clear()
            return done

    def _wrap(self) -> None:
        pool: Any = self._pool
        guard, beside, unpin = pool.guard, pool.guard_if_room, pool.unpin
        discard, reserve, borrow = pool.discard, pool.reserve, pool._core.held.borrow
        read, write = pool._below.read, pool._below.write

        def guarded(chunks: Iterable[Chunk], access: Access) -> Any:
            wanted = tuple(chunks)
            with pool.lock:
                found = guard(wanted, access)
                self._used(wanted, access)
                return found

        def guarded_beside(reads: Sequence[Chunk], writes: Sequence[Chunk], *more: Any, **others: Any) -> Any:
            with pool.lock:
                found = beside(reads, writes, *more, **others)
                if found is not None:
                    self._used(reads, Access.READ)
                    self._used(writes, Access.WRITE)
                return found

        def unpinned(chunks: Sequence[Chunk], *more: Any, **others: Any) -> None:
            with pool.lock:
                self._unused(chunks)
                unpin(chunks, *more, **others)

        def discarded(chunks: Iterable[Chunk]) -> None:
            gone = tuple(chunks)
            with pool.lock:
                discard(gone)
                for chunk in gone:
                    if chunk in self._latest:
                        self._latest[chunk].last = True

        def reserved(nbytes: int, ahead: int) -> None:
            with pool.lock:
                reserve(nbytes, ahead)
                self._moment()

        def borrowed(nbytes: int) -> None:
            borrow(nbytes)
            self._moment()

        def crossing(link: str, begin: Any) -> Any:
            def begun(chunk: Chunk, *more: Any) -> Any:
                key = (link, chunk.kind.value)
                self.order.moved[key] = self.order.moved.get(key, 0) + chunk.nbytes
                return begin(chunk, *more)

            return begun

        pool.guard, pool.guard_if_room, pool.unpin = guarded, guarded_beside, unpinned
        pool.discard, pool.reserve, pool._core.held.borrow = discarded, reserved, borrowed
        pool._below.read, pool._below.write = crossing("disk read", read), crossing("disk write", write)

    def _moment(self) -> int:
        self.order.room.append(self._pool.ceiling - self._pool._core.held.borrowed)
        return len(self.order.room) - 1

    def _begin(self, chunk: Chunk, now: int = 0) -> Use:
        use = Use(chunk, now)
        self.order.uses.append(use)
        return use

    def _used(self, chunks: Sequence[Chunk], access: Access) -> None:
        now = self._moment()
        for chunk in chunks:
            use = self._open.get(chunk)
            if use is None:
                use = self._open[chunk] = self._latest[chunk] = self._begin(chunk, now)
                use.reads = access is not Access.FRESH
            use.writes |= access is not Access.READ

    def _unused(self, chunks: Sequence[Chunk]) -> None:
        now = len(self.order.room)
        for chunk in chunks:
            if chunk.pins == 1 and chunk in self._open:
                self._open.pop(chunk).stop = now
