"""Between the device that computes and the chunks in which saved tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.pool import Access, Guard, Pool
from outcore.memory.frames import Frames
from outcore.memory.place import Place
from outcore.trace.meter import uncounted


class Carrier(Protocol):
    """Copies saved bytes into chunks, and shows them to backward."""

    def place(self, nbytes: int) -> Place:
        """Memory on the host for a chunk."""

    def store(self, chunk: Chunk, saved: torch.Tensor) -> None:
        """Copy bytes where computing happens (shape [nbytes], uint8) into an empty chunk.

        Raises:
            BudgetError, TierError: there is no room on the host, and none can be made.
        """

    def turn(self) -> None:
        """A block's forward is over: what blocks before it stored must have arrived."""

    def lift(self, chunks: Sequence[tuple[Chunk, int]]) -> None:
        """So many bytes of these chunks will be shown soon."""

    def show(self, chunk: Chunk, nbytes: int) -> tuple[torch.Tensor, Guard | None]:
        """The bytes of a chunk where computing happens, shape [nbytes], uint8, in a storage that nobody uses again.

        Returns:
            The bytes, and what must be closed when nobody looks at their storage any more.

        Raises:
            BudgetError, TierError: they can't be brought.
        """

    def forget(self, chunk: Chunk) -> None:
        """Nobody will ask for the chunk's bytes: afterwards no copy uses them."""

    def shut(self) -> None:
        """Wait for all copies."""


class HostCarrier:
    """The CPU computes: saved tensors are copied into chunks and seen where those lie.

    A copy, not the tensor's own memory: whoever else holds the tensor would keep that alive while it counts as gone.
    """

    def __init__(self, pool: Pool, frames: Frames) -> None:
        self._pool = pool
        self._frames = frames

    def place(self, nbytes: int) -> Place:
        return self._frames.place(nbytes)

    def store(self, chunk: Chunk, saved: torch.Tensor) -> None:
        with self._pool.guard([chunk], Access.FRESH), uncounted():
            chunk.region.tensor[: saved.numel()].copy_(saved)

    def turn(self) -> None:
        pass

    def lift(self, chunks: Sequence[tuple[Chunk, int]]) -> None:
        pass

    def show(self, chunk: Chunk, nbytes: int) -> tuple[torch.Tensor, Guard | None]:
        guard = self._pool.guard([chunk], Access.READ)
        with uncounted():
            return torch.frombuffer(chunk.region.buffer, dtype=torch.uint8, count=nbytes), guard

    def forget(self, chunk: Chunk) -> None:
        pass

    def shut(self) -> None:
        pass
