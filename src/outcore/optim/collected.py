"""The gradients of one step, as they lie in chunks."""

from __future__ import annotations

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.pool import Pool
from outcore.chunks.store import RunStore


class Collected:
    """Which gradients of one step there are, and in which chunks they lie.

    Attributes:
        present: numbers of the parameters that received one.
        begun: chunks that were written.
        wide: fp32 chunks that took the place of narrow ones.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.present: set[int] = set()
        self.begun: set[Chunk] = set()
        self.wide: set[Chunk] = set()

    def has(self, store: RunStore, k: int) -> bool:
        """Whether any parameter of chunk ``k`` received a gradient."""
        return store.gradients[k] in self.begun or store.totals[k] in self.begun

    def is_wide(self, store: RunStore, k: int) -> bool:
        return store.totals is store.gradients or store.totals[k] in self.wide

    def chunk(self, store: RunStore, k: int) -> Chunk:
        """The chunk that holds the gradients."""
        return store.totals[k] if self.is_wide(store, k) else store.gradients[k]

    def values(self, store: RunStore, k: int) -> torch.Tensor:
        """The gradients of chunk ``k``, shape [elements]; valid under a guard of `chunk`."""
        return store.total(k) if self.is_wide(store, k) else store.gradient(k)

    def discard(self, store: RunStore, k: int) -> None:
        """Give the bytes of chunk ``k`` back: its update is done."""
        self._pool.discard({store.gradients[k], store.totals[k]} & self.begun)

    def clear(self) -> None:
        """Forget all of them."""
        self._pool.discard(self.begun)
        self.begun.clear()
        self.wide.clear()
        self.present.clear()
