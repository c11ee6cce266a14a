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
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch

from outcore.memory.host import PAGE, Region, reserve
from outcore.memory.shared import SharedMemory
from outcore.parallel.node import share
from outcore.parallel.ranks import World
from outcore.parallel.wire import Wire


@dataclass(frozen=True)
class Piece:
    """What ranks have for each other of the same n elements.

    Attributes:
        sent: this rank's part for each, shape [ranks, n]: filled before `begin`, and left alone afterwards.
        received: each rank's part for this one, shape [ranks, n]: there when the wait is over, until two more pieces
            have begun.
    """

    sent: torch.Tensor
    received: torch.Tensor
    _exchanged: tuple[torch.Tensor, torch.Tensor]
    _wire: Wire

    def begin(self, what: str) -> Callable[[], None]:
        """Hand it over; what is returned waits until the others have.

        Args:
            what: for messages.
        """
        return self._wire.begin_exchange(*self._exchanged, what)


class Exchange(Protocol):
    """Pieces in one order, the same on all ranks. A piece is waited for before the one after the next is begun.

    Attributes:
        LARGEST: bytes of a piece, for all ranks together, beyond which larger ones are no faster.
        largest: the most bytes that one has here.
    """

    LARGEST: ClassVar[int]
    largest: int

    @classmethod
    def among(cls, world: World, largest: int) -> Self:
        """One for the ranks that keep different slices; all of them call this together.

        Raises:
            TierError: the system refused memory.
        """

    @classmethod
    def host_bytes(cls, largest: int) -> int:
        """Bytes on the host that this rank answers for, if pieces are no larger than ``largest``."""

    def next(self, count: int, dtype: torch.dtype) -> Piece:
        """The next piece: so many elements for each rank."""

    def release(self) -> None:
        """Give the pages back. All ranks are done with what they received."""


class WireExchange:
    """Over the wire. Implements `Exchange`.

    Args:
        largest: the most bytes of a piece.
    """

    LARGEST: ClassVar[int] = 2 << 20
    IN_TURN: ClassVar[int] = 2

    def __init__(self, wire: Wire, largest: int) -> None:
        self._wire, self.largest, self._count = wire, largest, 0
        self._region: Region = reserve(self.host_bytes(largest))

    @classmethod
    def among(cls, world: World, largest: int) -> Self:
        return cls(world.slices, largest)

    @classmethod
    def host_bytes(cls, largest: int) -> int:
        """What is sent, and what is received."""
        return 2 * cls.IN_TURN * largest

    def next(self, count: int, dtype: torch.dtype) -> Piece:
        self._count += 1
        size = self._wire.size
        places = self._region.tensor[: self.host_bytes(self.largest)].view(self.IN_TURN, 2, self.largest)
        both = places[self._count % self.IN_TURN]
        nbytes = size * count * dtype.itemsize
        sent, received = (row[:nbytes].view(dtype).view(size, count) for row in both)
        return Piece(sent, received, (received, sent), self._wire)

    def release(self) -> None:
        self._region.release()


class SharedExchange:
    """In memory that the ranks share, see [Note: Nothing is sent]. Implements `Exchange`.

    Args:
        memory: of `size` bytes, the same for all.
        largest: the most bytes of a piece.
    """

    LARGEST: ClassVar[int] = 4 << 20
    IN_TURN: ClassVar[int] = 4

    def __init__(self, wire: Wire, memory: SharedMemory, largest: int) -> None:
        self._wire, self._memory, self.largest, self._count = wire, memory, largest, 0
        self._part = self.host_bytes(largest)
        parts = memory.tensor[PAGE : PAGE + wire.size * self._part]
        self._places = parts.view(wire.size, self.IN_TURN, -1).unbind(1)

    @classmethod
    def among(cls, world: World, largest: int) -> Self:
        return cls(world.slices, share(world, cls.size(largest, world.slices.size)), largest)

    @classmethod
    def host_bytes(cls, largest: int) -> int:
        """This rank's part of the memory."""
        return cls.IN_TURN * (-(-largest // PAGE) * PAGE)

    @classmethod
    def size(cls, largest: int, ranks: int) -> int:
        """Bytes of the memory, whose first page says which one it is."""
        return PAGE + ranks * cls.host_bytes(largest)

    def next(self, count: int, dtype: torch.dtype) -> Piece:
        self._count += 1
        size, own = self._wire.size, self._wire.number
        place = self._places[self._count % self.IN_TURN][:, : size * count * dtype.itemsize]
        there = place.view(dtype).view(size, size, count)  # from each rank, for each
        words = torch.zeros(2, size, dtype=torch.uint8)
        return Piece(there[own], there[:, own], (words[0], words[1]), self._wire)

    def release(self) -> None:
        self._memory.take_away(PAGE + self._wire.number * self._part, self._part)
