"""The chunks of a layout as pieces of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.chunks.chunk import Chunk
from outcore.chunks.store import RunStore
from outcore.planning.flow import Piece
from outcore.planning.least import buffer_bytes


@dataclass(frozen=True)
class StorePieces:
    """A run's pieces.

    Attributes:
        gradients: where the first gradients of a step go.
        totals: where they go with the second.
        nbytes: of the parameters, without padding to pages.
        buffer: of their gradients on a device.
    """

    parameters: Sequence[Piece]
    gradients: Sequence[Piece]
    totals: Sequence[Piece]
    states: Sequence[Piece]
    nbytes: int
    buffer: int
    arrivals: Sequence[range]
    """The chunks that each parameter's gradient goes to, in the order in which backward makes them."""

    def updates(self, summed: bool) -> list[tuple[Piece, list[Piece]]]:
        """What its updates read and write, chunk by chunk: a gradient; the parameter and its states.

        Args:
            summed: gradients of several passes are in their fp32 sums.
        """
        return [
            (gradient, [self.parameters[k], *self.states[k : k + 1]])
            for k, gradient in enumerate(self.totals if summed else self.gradients)
        ]


class Pieces:
    """Makes pieces and numbers them."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def _make(self, chunks: Sequence[Chunk]) -> list[Piece]:
        first, self._count = self._count, self._count + len(chunks)
        return [Piece(chunk.nbytes, first + k) for k, chunk in enumerate(chunks)]

    def saved(self, nbytes: int) -> Piece:
        """A piece for activations that are offloaded."""
        self._count += 1
        return Piece(nbytes, self._count - 1)

    def of(self, store: RunStore, wide: bool) -> StorePieces:
        """A run's pieces.

        Args:
            wide: its gradients come as fp32 sums over slices.
        """
        gradients = self._make(store.totals if wide else store.gradients)
        totals = gradients if wide or store.totals is store.gradients else self._make(store.totals)
        arrivals = [store.run.covering(slot) for slot in reversed(store.run.slots)]
        return StorePieces(
            self._make(store.parameters),
            gradients,
            totals,
            self._make(store.states),
            store.run.nbytes,
            buffer_bytes(store, wide) if store.run.trained else 0,
            arrivals if store.gradients else (),
        )
