"""Host memory whose addresses may change, in frames that go from one chunk to the next.

[Note: Pages that go on]
Pages that are given back and taken again must be found and cleared by the system each time; where small pages are all
that it has, a chunk of 32 MiB is 8,192 faults. With states on disk every byte that is read did that: a fifth
of all processor time of such a step. Nothing aliases the optimizer's states and the gradients between
uses, so unlike parameters (see `outcore.memory.host`) they need no address of their own: a chunk that comes in
takes over the pages of one of the same size that leaves, as they are.

A frame without pages is an address alone. Those are kept by size, so that a model whose states are a hundred
times the host's memory reserves addresses only for what is there at a time.
"""

from __future__ import annotations

import threading

import torch

from outcore.memory.host import PAGE, Region, reserve


class Frames:
    """Addresses by size, for places that need none of their own. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Region]] = {}
        self._lock = threading.Lock()

    def place(self, nbytes: int) -> Framed:
        """A place of ``nbytes`` bytes, without pages yet."""
        return Framed(self, nbytes)

    def take(self, nbytes: int) -> Region:
        """A frame of ``nbytes`` of addresses without pages.

        Raises:
            TierError: the system refused addresses.
        """
        with self._lock:
            idle = self._idle.get(nbytes)
            if idle:
                return idle.pop()
        return reserve(nbytes)

    def put(self, frame: Region) -> None:
        """A frame that is not used any more; its pages go back to the system."""
        frame.release()
        with self._lock:
            self._idle.setdefault(frame.nbytes, []).append(frame)


class Framed:
    """A place in whichever frame it has now. Is `Place`.

    Attributes:
        frame_bytes: addresses of its frame, a power of two: the chunks of a run differ in size by a few pages, and
            go into each other's frames.
    """

    __slots__ = ("_frame", "_frames", "frame_bytes", "nbytes")

    def __init__(self, frames: Frames, nbytes: int) -> None:
        self.nbytes = nbytes
        self.frame_bytes = max(PAGE, 1 << (nbytes - 1).bit_length())
        self._frames = frames
        self._frame: Region | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self._have().tensor[: self.nbytes]

    @property
    def buffer(self) -> memoryview:
        return self._have().buffer[: self.nbytes]

    def release(self) -> None:
        if self._frame is not None:
            frame, self._frame = self._frame, None
            self._frames.put(frame)

    def take_over(self, other: Framed) -> None:
        """Take the pages of a place whose bytes are worth nothing any more, as many as are needed, as they are.

        Args:
            other: one with frames of the same size.
        """
        assert other.frame_bytes == self.frame_bytes
        self.release()
        self._frame, other._frame = other._frame, None
        if self._frame is not None:
            self._frame.end_at(self.nbytes)

    def _have(self) -> Region:
        if self._frame is None:
            self._frame = self._frames.take(self.frame_bytes)
            self._frame.end_at(self.nbytes)
        return self._frame
