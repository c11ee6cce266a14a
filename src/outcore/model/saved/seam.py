"""What other parts of the model's room know of saved tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from outcore.chunks.chunk import Chunk
from outcore.model.unit import Unit


class Saver(Protocol):
    """Takes over what autograd saves within calls of blocks."""

    def call(self, unit: int, name: str) -> AbstractContextManager[None]:
        """One call of the block ``name`` in forward; ``unit`` is the number of the one that opens with it in backward.

        Raises:
            ModelError: somebody else's hooks take what is saved already.
        """


class Saved(Protocol):
    """Told of the uses of units."""

    def sweep(self) -> None:
        """Give back what nobody will ask for any more."""

    def expected(self, unit: Unit) -> tuple[Chunk, ...]:
        """The chunks that the unit's next backward reads, those first that it reads first."""

    def opened(self, unit: Unit) -> None:
        """The unit's backward begins."""

    def shut(self) -> None:
        """Wait for all copies."""


class NothingSaved:
    """Autograd keeps what it saves."""

    def sweep(self) -> None:
        pass

    def expected(self, unit: Unit) -> tuple[Chunk, ...]:
        return ()

    def opened(self, unit: Unit) -> None:
        pass

    def shut(self) -> None:
        pass
