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
        arrivals: the chunks that each parameter's gradient goes to, in the order in which backward makes them.
        parts: of parameters, in each chunk.
    """

    parameters: Sequence[Piece]
    gradients: Sequence[Piece]
    totals: Sequence[Piece]
    states: Sequence[Piece]
    nbytes: int
    buffer: int
    arrivals: Sequence[range]
    parts: Sequence[int]

    @classmethod
    def of(cls, store: RunStore, wide: bool) -> StorePieces:
        """The pieces of a run.

        Args:
            wide: its gradients come as fp32 sums over slices.
        """
        gradients = _made(store.totals if wide else store.gradients)
        totals = gradients if wide or store.totals is store.gradients else _made(store.totals)
        arrivals = [store.run.covering(slot) for slot in reversed(store.run.slots)]
        return cls(
            _made(store.parameters),
            gradients,
            totals,
            _made(store.states),
            store.run.nbytes,
            buffer_bytes(store, wide) if store.run.trained else 0,
            arrivals if store.gradients else (),
            [len(store.run.segments(k)) for k in range(store.run.chunks)],
        )

    def updates(self, summed: bool) -> list[tuple[Piece, list[Piece]]]:
        """What its updates read and write, chunk by chunk: a gradient; the parameter and its states.

        Args:
            summed: gradients of several passes are in their fp32 sums.
        """
        return [
            (gradient, [self.parameters[k], *self.states[k : k + 1]])
            for k, gradient in enumerate(self.totals if summed else self.gradients)
        ]


def _made(chunks: Sequence[Chunk]) -> list[Piece]:
    return [Piece(chunk.nbytes, chunk.name) for chunk in chunks]
