"""Servers of a virtual clock: a disk and links that move pieces one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outcore.chunks.chunk import Chunk, Kind
from outcore.errors import StateError
from outcore.memory.lane import READS_PER_WRITE


class Nowhere:
    """Where the bytes of a plan and of its simulation lie. Is `outcore.memory.place.Place` without any."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, device="meta")

    @property
    def buffer(self) -> memoryview:
        raise StateError("a simulation moves no bytes")

    def release(self) -> None:
        """Nothing is held."""


class Piece(Chunk):
    """A chunk in a simulation.

    Attributes:
        stored: whether it has an extent on disk.
    """

    def __init__(self, nbytes: int, name: str = "") -> None:
        super().__init__(Kind.STATE, name, Nowhere(nbytes))
        self.stored = False


@dataclass(frozen=True)
class Traffic:
    """What transfers between host and disk take, and what they take from computing.

    Attributes:
        read: bytes per second.
        write: likewise.
        turn: seconds that a transfer takes beside those of its bytes.
        io_turn: seconds of computing that a transfer costs, beside those of its bytes.
        io_rate: bytes that cost one more; 0: bytes cost none.
        slowed: share of its speed that the disk keeps while the training thread computes.
        use: seconds of the thread that uses it that each use of a piece takes.
    """

    read: float
    write: float
    turn: float = 0.0
    io_turn: float = 0.0
    io_rate: float = 0.0
    slowed: float = 1.0
    use: float = 0.0

    def cost(self, nbytes: int) -> float:
        """Seconds of computing that a transfer costs."""
        return self.io_turn + (nbytes / self.io_rate if self.io_rate else 0.0)


class Disk:
    """Serves whole pieces in order, reads first, as `outcore.memory.lane` does.

    Args:
        done: called with each piece and its time when its transfer ends.
    """

    def __init__(self, traffic: Traffic, done: Callable[[Piece, bool, float], None]) -> None:
        self._rates = (traffic.read, traffic.write)
        self._done = done
        self._traffic = traffic
        self._reads: deque[tuple[Piece, float]] = deque()
        self._writes: deque[tuple[Piece, float]] = deque()
        self._in_row = 0
        self._worked = 0.0
        self._left = self._cost = 0.0
        self._current: tuple[Piece, bool] | None = None
        self.moved = [0, 0]
        self.busy = [0.0, 0.0]

    @property
    def idle(self) -> bool:
        return self._current is None and not self._reads and not self._writes

    @property
    def costs(self) -> float:
        """Seconds of computing that each second of its work costs now. Only while not `idle`."""
        self._start()
        return self._cost

    def submit(self, piece: Piece, writing: bool, now: float) -> None:
        (self._writes if writing else self._reads).append((piece, now))

    def _start(self) -> None:
        if self._current is not None or not (self._reads or self._writes):
            return
        writing = not self._reads or (bool(self._writes) and self._in_row >= READS_PER_WRITE)
        self._in_row = 0 if writing else self._in_row + 1
        piece, since = (self._writes if writing else self._reads).popleft()
        self._left = self._traffic.turn + piece.nbytes / self._rates[writing]
        self._cost = self._traffic.cost(piece.nbytes) / self._left if self._left else 0.0
        self._worked = max(self._worked, since)
        self.moved[writing] += piece.nbytes
        self.busy[writing] += self._left
        self._current = piece, writing

    def run(self, until: float, speed: float = 1.0) -> None:
        """Let transfers end that do so by then; ``speed`` is the share of its own that the disk has."""
        while True:
            self._start()
            if self._current is None:
                return
            end = self._worked + self._left / speed
            if end > until:
                self._left -= max(0.0, until - self._worked) * speed
                self._worked = max(self._worked, until)
                return
            (piece, writing), self._current = self._current, None
            self._worked = end
            self._done(piece, writing, end)

    def next_end(self, speed: float = 1.0) -> float:
        """When the transfer under way ends, at this speed. Only while not `idle`."""
        self._start()
        assert self._current is not None
        return self._worked + self._left / speed


class Link:
    """One direction between host and device: what is sent arrives in order."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self.moved = 0
        self.busy = 0.0

    def send(self, nbytes: int, now: float) -> float:
        """When it has arrived."""
        seconds = nbytes / self._rate
        self._free = max(self._free, now) + seconds
        self.moved += nbytes
        self.busy += seconds
        return self._free
