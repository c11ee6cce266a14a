"""What a chunk asks of the host memory it lies in."""

from __future__ import annotations

from typing import Protocol

import torch


class Place(Protocol):
    """Bytes on the host that can be given back and taken again."""

    @property
    def nbytes(self) -> int:
        """How many."""

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, shape [nbytes], uint8; zeros when first used after a release."""

    @property
    def buffer(self) -> memoryview:
        """The bytes as something to read into and write from."""

    def release(self) -> None:
        """Give the bytes back."""
