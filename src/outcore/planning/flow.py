"""Servers of a virtual clock: a disk and links that move pieces one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outcore.chunks.chunk import Chunk, Kind
from outcore.errors import BudgetError, StateError
from outcore.memory.lane import READS_PER_WRITE
from outcore.memory.ledger import Ledger


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
    """A chunk in a simulation."""

    def __init__(self, nbytes: int, name: str = "") -> None:
        super().__init__(Kind.STATE, name, Nowhere(nbytes))


def refused(tier: str, needed: int, budget: int) -> BudgetError:
    """What must be on a tier at one moment of a simulated run is more than its budget."""
    return BudgetError(tier, needed, budget, "give it more, or use smaller micro-batches or recomputation")


@dataclass(frozen=True)
class _Transfer:
    """A chunk on its way, asked for at a moment."""

    chunk: Chunk
    done: Callable[[Chunk], None]
    writing: bool
    since: float


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
    """Serves whole chunks in order, reads first, as `outcore.memory.lane` does. Is `outcore.chunks.core.Disk`.

    Args:
        budget: bytes it may hold.
        ledger: where what it holds is written.
        clock: the present moment, at which transfers are asked for.
    """

    def __init__(self, traffic: Traffic, budget: int, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._traffic = traffic
        self._budget = budget
        self._ledger = ledger
        self._clock = clock
        self._rates = (traffic.read, traffic.write)
        self._stored: set[Chunk] = set()
        self._reads: deque[_Transfer] = deque()
        self._writes: deque[_Transfer] = deque()
        self._current: _Transfer | None = None
        self._in_row = 0
        self._worked = 0.0
        self._left = self._cost = 0.0
        self._moment: float | None = None  # of the transfer that just ended, while the clock is still behind
        self.leaving = 0
        self.moved = [0, 0]
        self.busy = [0.0, 0.0]

    # -- what a core asks for -----------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._reads) + len(self._writes) + (self._current is not None)

    def allocate(self, chunk: Chunk) -> None:
        if chunk not in self._stored:
            self._stored.add(chunk)
            self._ledger.hold("disk", chunk.nbytes)
            held = self._ledger.held("disk")
            if held > self._budget:
                raise refused("disk", held, self._budget)

    def free(self, chunk: Chunk) -> None:
        if chunk in self._stored:
            self._stored.remove(chunk)
            self._ledger.hold("disk", -chunk.nbytes)

    def read(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        self._reads.append(_Transfer(chunk, done, False, self._now()))

    def write(self, chunk: Chunk, done: Callable[[Chunk], None]) -> None:
        self.leaving += chunk.nbytes
        self._writes.append(_Transfer(chunk, done, True, self._now()))

    def _now(self) -> float:
        return self._clock() if self._moment is None else self._moment

    # -- time -------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._current is None and not self._reads and not self._writes

    @property
    def costs(self) -> float:
        """Seconds of computing that each second of its work costs now. Only while not `idle`."""
        self._start()
        return self._cost

    def _start(self) -> None:
        if self._current is not None or not (self._reads or self._writes):
            return
        writing = not self._reads or (bool(self._writes) and self._in_row >= READS_PER_WRITE)
        self._in_row = 0 if writing else self._in_row + 1
        found = (self._writes if writing else self._reads).popleft()
        nbytes = found.chunk.nbytes
        self._left = self._traffic.turn + nbytes / self._rates[writing]
        self._cost = self._traffic.cost(nbytes) / self._left if self._left else 0.0
        self._worked = max(self._worked, found.since)
        self.moved[writing] += nbytes
        self.busy[writing] += self._left
        self._current = found

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
            self._worked = end
            self._end()

    def _end(self) -> None:
        """The transfer under way is over."""
        over, self._current = self._current, None
        assert over is not None
        self.leaving -= over.chunk.nbytes if over.writing else 0
        self._moment = self._worked
        over.done(over.chunk)
        self._moment = None

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
