"""Which part of the tokens comes when: the same for a seed on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from outcore.errors import UsageError


class Batches:
    """Windows of ``seq_len`` tokens that don't overlap, each once per epoch, in an order drawn from the seed.

    Args:
        tokens: all tokens, shape (n,).
        seq_len: tokens of a window.
        batch_size: windows of a batch.
        seed: of the order.

    Raises:
        UsageError: there is not one whole window.
    """

    def __init__(self, tokens: npt.NDArray[Any], seq_len: int, batch_size: int, seed: int) -> None:
        self.windows = len(tokens) // seq_len
        if self.windows == 0:
            raise UsageError(
                f"the text has only {len(tokens)} tokens, less than one sequence of {seq_len}: "
                "give more text, or a smaller --seq-len"
            )
        self._tokens = tokens
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._seed = seed
        self._begin(0)

    def next(self) -> npt.NDArray[np.int64]:
        """The next batch, shape (batch_size, seq_len). Where an epoch ends within it, the next one begins."""
        rows = np.empty((self._batch_size, self._seq_len), np.int64)
        for row in rows:
            if self._position == self.windows:
                self._begin(self._epoch + 1)
            start = int(self._order[self._position]) * self._seq_len
            row[:] = self._tokens[start : start + self._seq_len]
            self._position += 1
        return rows

    def state(self) -> dict[str, int]:
        """Where it is, for `restore`."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a `state` of the same tokens and sizes.

        Raises:
            UsageError: the state is of other data.
        """
        if not 0 <= state["position"] <= self.windows:
            raise UsageError(
                f"the position {state['position']} lies beyond the {self.windows} windows of this data"
            )
        self._seed = state["seed"]
        self._begin(state["epoch"])
        self._position = state["position"]

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        dtype = np.uint32 if self.windows <= 1 << 32 else np.uint64
        self._order = np.arange(self.windows, dtype=dtype)
        np.random.Generator(np.random.PCG64([self._seed, epoch])).shuffle(self._order)
