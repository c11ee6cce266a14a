"""Room on the host under one budget: which pages go, and which chunk leaves.

[Note: Room]
A chunk that comes in needs room under the ceiling. Pages that hold nothing go first, then clean victims. Dirty ones
are written first, and their bytes count until the write is done; as many writes are in the air as the room asked
for. A demand waits for them, a prefetch gives up and is tried again when one ends. A prefetch may only push out what
is needed later than what it brings, so it never hurts.

Whom to evict is the `Replacer`'s choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from outcore.chunks.chunk import Chunk, Residence
from outcore.chunks.holdings import Holdings
from outcore.chunks.lookahead import NEAR, Lookahead
from outcore.chunks.replacers import Replacer

BEHIND = 16
"""The most chunks that are looked at for a write ahead of its need: as many as leave while one is written."""


class Leaving(Protocol):
    """Where chunks leave to."""

    @property
    def leaving(self) -> int:
        """Bytes being written."""


class _Nowhere:
    leaving = 0


class Room:
    """Keeps what is held under the ceiling. Used under the pool's lock alone.

    Args:
        budget: bytes that chunks, and what is set aside, may take.
        disk: ``None`` if dirty chunks can't leave at all.
        write: begins to write one to disk.

    Attributes:
        reserved: bytes set aside for what is not a chunk.
        needed: chunks in use now, which are the last to leave.
    """

    def __init__(
        self,
        budget: int,
        held: Holdings,
        disk: Leaving | None,
        replacer: Replacer,
        write: Callable[[Chunk], None],
    ) -> None:
        self.budget = budget
        self.reserved = self._ahead = self._most_reserved = 0
        self.needed: frozenset[Chunk] = frozenset()
        self._held = held
        self._has_disk = disk is not None
        self._disk = disk or _Nowhere()
        self._replacer = replacer
        self._write = write

    @property
    def ceiling(self) -> int:
        """Bytes that may be held now."""
        return self.budget - self.reserved

    @property
    def clear(self) -> int:
        """Bytes that may be held by what is brought ahead of its use: the rest is needed soon."""
        return self.budget - self._ahead

    @property
    def floor(self) -> int:
        """Bytes that were left where the most was set aside so far."""
        return self.budget - self._most_reserved

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set bytes aside; ``ahead`` of them are needed soon."""
        self.reserved, self._ahead = nbytes, max(nbytes, ahead)
        self._most_reserved = max(self._most_reserved, nbytes)

    def make(
        self, beyond: int = -1, *, nbytes: int = 0, newcomers: Sequence[Chunk] = (), ahead: bool = False
    ) -> bool:
        """Evict until chunks and other bytes fit; false if some must still leave, or nothing may.

        Args:
            beyond: only what is used later than in so many ticks leaves; below 0 whatever is not pinned.
            nbytes: other bytes that are to come.
            newcomers: chunks that are to come.
            ahead: they are brought ahead of their use.

        Raises:
            TierError: the disk refused to take what would have to leave.
        """
        ceiling = self.clear if ahead else self.ceiling
        while (short := self._held.used + self._held.missing(newcomers) + nbytes - ceiling) > 0:
            if self._held.cool(newcomers):
                continue
            if self._disk.leaving >= short:
                return False
            victim = self._victim(beyond)
            if victim is None:
                return False
            if victim.residence is Residence.CLEAN:
                self._held.vacate(victim)
            else:
                self._write(victim)
        return True

    def read_ahead(self, ahead: Lookahead, read: Callable[[Chunk], None], working: int) -> None:
        """Start the reads that the near future needs, soonest first, until one finds no room, and writes that make it.

        No more than a quarter of `clear` is kept for them, those that are on the host already included: to read
        further ahead is to drop what was used last and is used again in the next pass, and to read that once more.

        Args:
            read: begins to read a chunk for which there is room.
            working: the most bytes that one use needs.

        Raises:
            TierError: the disk refused to take what would have to leave.
        """
        horizon = self.clear // 4
        if not self._held.below and self._held.used + max(horizon, NEAR * working) <= self.clear:
            return  # nothing to read, and no room to make: to walk through what comes would find just that
        ahead.follow(horizon)
        while (found := ahead.soonest()) is not None:
            distance, chunk = found
            if not self.make(distance, newcomers=(chunk,), ahead=True):
                break
            if chunk.residence is Residence.DISK:  # a write that was over at once may have let it in
                read(chunk)
        self.write_behind(ahead.absent, ahead.reach)

    def write_behind(self, coming: int, beyond: int) -> None:
        """Begin to write what will have to leave for so many bytes that come soon, so that nobody waits for it then.

        Only what is used later than ``beyond`` ticks from now, and whose room is needed: it would be written anyway.

        Raises:
            TierError: the disk refused to take it.
        """
        if not coming or not self._has_disk:
            return
        short = self._held.used - self._held.warm + coming - self.clear - self._disk.leaving
        if short <= 0:
            return
        for chunk in islice(self._replacer.leaving(self.may_leave, beyond), BEHIND):
            if chunk.residence is Residence.DIRTY and chunk not in self.needed:
                self._write(chunk)
            short -= chunk.nbytes
            if short <= 0:
                return

    def _victim(self, beyond: int) -> Chunk | None:
        last = None
        for chunk in self._replacer.leaving(self.may_leave, beyond):
            if chunk not in self.needed:
                return chunk
            last = last or chunk
        return last if beyond < 0 else None

    def may_leave(self, chunk: Chunk) -> bool:
        """Whether nobody uses the chunk, and the disk has it or can take it."""
        return chunk.pins == 0 and (
            chunk.residence is Residence.CLEAN
            or (chunk.residence is Residence.DIRTY and self._has_disk and chunk.error is None)
        )

    def offer(self, chunks: Iterable[Chunk]) -> None:
        """Something about these chunks changed: those that may leave now are candidates."""
        for chunk in chunks:
            if self.may_leave(chunk):
                self._replacer.offer(chunk)

    def evictable(self) -> list[Chunk]:
        """All that may leave."""
        return [chunk for chunk in self._held if self.may_leave(chunk)]
