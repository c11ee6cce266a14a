"""Pieces of what each rank of a group has for each other one: over the wire, or in memory that they share.

[Note: Nothing is sent]
Where all ranks are on one machine, a rank writes what it has for the others to its part of a memory that all of them
map, and they read it there. What crosses the wire is a word for each piece: that it is there. So a byte is written
once and read once, where gloo has the kernel copy it into a socket and out again.

A part has room for `IN_TURN` pieces, which are used in turn, and no other word is needed to say that one may be
overwritten: a rank says that piece t + 2 is there when it is done with piece t, and writes piece t + 4 when it has
heard that of all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from outcore.memory.host import PAGE, Region, reserve
from outcore.memory.shared import SharedMemory
from outcore.parallel.wire import Wire

Received = Callable[[], torch.Tensor]
"""Waits for a piece; returns what each rank has for this one, shape [ranks, n], valid until two more are begun."""


class Exchange(Protocol):
    """Pieces in one order, the same on all ranks. A piece is waited for before the one after the next is begun.

    Attributes:
        PIECE: bytes of a piece, for all ranks together, beyond which larger ones are no faster.
        piece: the most bytes that one has here.
    """

    PIECE: ClassVar[int]
    piece: int

    @classmethod
    def room(cls, piece: int) -> int:
        """Bytes on the host that this rank answers for, if pieces are no larger than ``piece``."""

    def next(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where the next piece goes: so many elements for each rank, shape [ranks, count]."""

    def begin(self, what: str) -> Received:
        """Hand it over.

        Args:
            what: for messages.
        """

    def release(self) -> None:
        """Give the pages back. All ranks are done with what they received."""


class Sent:
    """Over the wire. Implements `Exchange`.

    Args:
        piece: the most bytes of a piece.
    """

    PIECE: ClassVar[int] = 2 << 20
    IN_TURN: ClassVar[int] = 2

    def __init__(self, wire: Wire, piece: int) -> None:
        self._wire, self.piece, self._count = wire, piece, 0
        self._region: Region = reserve(self.room(piece))
        self._sent = self._received = self._region.tensor

    @classmethod
    def room(cls, piece: int) -> int:
        """What is sent, and what is received."""
        return 2 * cls.IN_TURN * piece

    def next(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._count += 1
        nbytes = self._wire.size * count * dtype.itemsize
        start = 2 * self.piece * (self._count % self.IN_TURN)
        data = self._region.tensor[start : start + 2 * self.piece].view(2, self.piece)[:, :nbytes]
        self._sent, self._received = (row.view(dtype).view(self._wire.size, count) for row in data)
        return self._sent

    def begin(self, what: str) -> Received:
        received = self._received
        arrive = self._wire.begin_exchange(received, self._sent, what)

        def wait() -> torch.Tensor:
            arrive()
            return received

        return wait

    def release(self) -> None:
        self._region.release()


class Shown:
    """In memory that the ranks share, see [Note: Nothing is sent]. Implements `Exchange`.

    Args:
        memory: of `size` bytes, the same for all.
        piece: the most bytes of a piece.
    """

    PIECE: ClassVar[int] = 4 << 20
    IN_TURN: ClassVar[int] = 4

    def __init__(self, wire: Wire, memory: SharedMemory, piece: int) -> None:
        self._wire, self._memory, self.piece, self._count = wire, memory, piece, 0
        self._part = self.room(piece)
        data = memory.tensor[PAGE : PAGE + wire.size * self._part]
        self._pieces = data.view(wire.size, self.IN_TURN, -1).unbind(1)
        self._there = data

    @classmethod
    def room(cls, piece: int) -> int:
        """This rank's part of the memory."""
        return cls.IN_TURN * (-(-piece // PAGE) * PAGE)

    @classmethod
    def size(cls, piece: int, ranks: int) -> int:
        """Bytes of the memory, whose first page says which one it is."""
        return PAGE + ranks * cls.room(piece)

    def next(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        self._count += 1
        size = self._wire.size
        data = self._pieces[self._count % self.IN_TURN][:, : size * count * dtype.itemsize]
        self._there = data.view(dtype).view(size, size, count)
        own: torch.Tensor = self._there[self._wire.number]
        return own

    def begin(self, what: str) -> Received:
        received = self._there[:, self._wire.number]
        word = torch.zeros(2, self._wire.size, dtype=torch.uint8)
        arrive = self._wire.begin_exchange(word[0], word[1], what)

        def wait() -> torch.Tensor:
            arrive()
            return received

        return wait

    def release(self) -> None:
        self._memory.take_away(PAGE + self._wire.number * self._part, self._part)
