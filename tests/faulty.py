"""A disk that fails when told to.

`FaultyFile` stands before any `BlockFile` and counts operations. A `Fault` strikes the N-th operation of
its kind, once or for ever. A paused file holds each transfer after it was done and before it returns,
until the test lets it go: so completions come late and in any order, without a sleep.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import pytest

from outcore.memory.blockfile import BlockFile, MemoryFile

Operation = Literal["read", "write", "extend"]
Kind = Literal["eio", "enospc", "eintr", "short", "none", "torn", "lost", "flip", "stale", "swap", "late"]

LOUD: dict[str, int] = {"eio": errno.EIO, "enospc": errno.ENOSPC, "eintr": errno.EINTR}
"""Faults that the system reports."""

KINDS: dict[Operation, tuple[Kind, ...]] = {
    "read": ("eio", "eintr", "short", "none", "flip", "stale", "swap"),
    "write": ("eio", "enospc", "eintr", "short", "none", "torn", "lost", "flip"),
    "extend": ("eio", "enospc"),
}
"""What can happen to each operation.

- ``short``: half is moved, and said so; ``none``: nothing is moved, and said so;
- ``torn``: half is written, ``lost``: nothing is, and success is claimed;
- ``flip``: one bit differs; ``stale``: what was there before the last write; ``swap``: another block's bytes;
- ``late`` (no fault, and so not among these): it takes its time.
"""


@dataclass(frozen=True)
class Fault:
    """Strikes the ``at``-th operation of its kind (from 1), or that and all later ones."""

    operation: Operation
    at: int
    kind: Kind
    forever: bool = False

    def strikes(self, operation: str, count: int) -> bool:
        return operation == self.operation and (count == self.at or (self.forever and count > self.at))


@dataclass
class _Held:
    """A transfer that waits to return."""

    operation: str
    offset: int
    gone: bool = False


@dataclass
class FaultyFile:
    """A `BlockFile` with faults. Thread-safe, as far as ``inner`` is.

    Attributes:
        counts: operations so far, by kind.
        log: operations in the order in which they began, with their offsets.
    """

    inner: BlockFile
    faults: Sequence[Fault] = ()
    counts: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0, "extend": 0})
    log: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False
    _before: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _held: list[_Held] = field(default_factory=list)
    _paused: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def operations(self) -> int:
        """Operations so far."""
        return sum(self.counts.values())

    # -- the file ---------------------------------------------------------------------------------

    def pread(self, view: memoryview, offset: int) -> int:
        kind = self._begin("read", offset)
        moved = self._read(kind, view, offset)
        self._hold("read", offset)
        return moved

    def pwrite(self, view: memoryview, offset: int) -> int:
        kind = self._begin("write", offset)
        moved = self._write(kind, view, offset)
        self._hold("write", offset)
        return moved

    def extend(self, nbytes: int) -> None:
        self._begin("extend", nbytes)
        self.inner.extend(nbytes)

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    # -- faults -----------------------------------------------------------------------------------

    def _begin(self, operation: str, offset: int) -> Kind | None:
        with self._changed:
            self.counts[operation] += 1
            self.log.append((operation, offset))
            count = self.counts[operation]
        for fault in self.faults:
            if fault.strikes(operation, count):
                if fault.kind in LOUD:
                    raise OSError(LOUD[fault.kind], os.strerror(LOUD[fault.kind]))
                if fault.kind == "late":
                    time.sleep(0.002 if fault.forever else 0.03)
                return fault.kind
        return None

    def _read(self, kind: Kind | None, view: memoryview, offset: int) -> int:
        if kind == "none":
            return 0
        if kind == "short":
            return self.inner.pread(view[: len(view) // 2], offset)
        moved = self.inner.pread(view, offset)
        if kind == "flip":
            view[len(view) // 2] ^= 1
        elif kind == "stale":
            view[:] = self._before.get((offset, len(view)), bytes(len(view)))
        elif kind == "swap":
            others = sorted(start for start, size in self._before if start != offset and size == len(view))
            self.inner.pread(view, others[0] if others else offset + len(view))
        return moved

    def _write(self, kind: Kind | None, view: memoryview, offset: int) -> int:
        if kind == "none":
            return 0
        if kind == "short":
            return self.inner.pwrite(view[: len(view) // 2], offset)
        if kind == "lost":
            return len(view)
        if kind == "torn":
            self.inner.pwrite(view[: len(view) // 2], offset)
            return len(view)
        before = bytearray(len(view))
        if self.faults:
            self.inner.pread(memoryview(before), offset)
        self._before[offset, len(view)] = bytes(before)
        if kind == "flip":
            changed = bytearray(view)
            changed[len(changed) // 2] ^= 1
            return self.inner.pwrite(memoryview(changed), offset)
        return self.inner.pwrite(view, offset)

    # -- time -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """From now on transfers wait before they return."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        """Let everything go."""
        with self._changed:
            self._paused = False
            for held in self._held:
                held.gone = True
            self._held.clear()
            self._changed.notify_all()

    def wait_for(self, count: int) -> list[tuple[str, int]]:
        """Wait until ``count`` transfers are held; which they are."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._held) >= count, timeout=30)
            return [(held.operation, held.offset) for held in self._held]

    def let(self, index: int = 0) -> None:
        """Let one of the held transfers go."""
        with self._changed:
            self._held.pop(index).gone = True
            self._changed.notify_all()

    def finish_shuffled(self, seed: int, futures: Iterable[Future[None]], width: int) -> None:
        """Let transfers go in a random order until the futures are done, choosing among up to ``width``."""
        chance = random.Random(seed)
        left = set(futures)

        def finished(future: Future[None]) -> None:
            with self._changed:
                left.discard(future)
                self._changed.notify_all()

        for future in list(left):
            future.add_done_callback(finished)
        while True:
            with self._changed:
                # Fewer than `width` may be all there is: then a short while without news is enough.
                self._changed.wait_for(lambda: len(self._held) >= width or not left, timeout=0.005)
                if not left:
                    break
                if self._held:
                    self._held.pop(chance.randrange(len(self._held))).gone = True
                    self._changed.notify_all()
        self.resume()

    def _hold(self, operation: str, offset: int) -> None:
        with self._changed:
            if not self._paused:
                return
            held = _Held(operation, offset)
            self._held.append(held)
            self._changed.notify_all()
            self._changed.wait_for(lambda: held.gone)


def install(
    monkeypatch: pytest.MonkeyPatch,
    faults: Sequence[Fault] = (),
    inner: Callable[[str], BlockFile] = lambda path: MemoryFile(name=path),
) -> list[FaultyFile]:
    """Make every disk tier that is opened from now on use faulty files; the list fills as they are opened."""
    opened: list[FaultyFile] = []

    def open_files(places: Sequence[object]) -> list[FaultyFile]:
        new = [FaultyFile(inner(str(place)), faults) for place in places]
        opened.extend(new)
        return new

    monkeypatch.setattr("outcore.memory.disk.open_files", open_files)
    return opened
