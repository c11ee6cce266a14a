"""A unit at run time: its parameters bound to their places in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from outcore.chunks.chunk import Chunk
from outcore.chunks.layout import Slot
from outcore.chunks.store import RunStore
from outcore.memory.refusal import allocating_on_device


@dataclass(eq=False)
class Binding:
    """A parameter and its place.

    Attributes:
        name: the parameter's full name.
        resting: what the parameter reads as while its unit is closed: one NaN, expanded to its shape, so that
            a use outside of a guard is loud and a write raises. Of one element: see `outcore.model.singles`.
    """

    name: str
    parameter: nn.Parameter
    store: RunStore
    slot: Slot
    resting: torch.Tensor = field(init=False)


def _none(unit: Unit) -> int:
    return 0


@dataclass(frozen=True)
class Extra:
    """Host bytes that a way of computing takes beside chunks.

    Attributes:
        frame: of a unit, while it is open.
        working: at any moment of a step.
        total: between two uses of anything, beside all chunks.
    """

    frame: Callable[[Unit], int] = _none
    working: int = 0
    total: int = 0


@dataclass(eq=False)
class Unit:
    """The parameters fetched together, and their chunks.

    Attributes:
        opened: how many guards hold it open; its parameters point at real values while it is above 0.
        version: grows whenever its values change: by a step, a load, `outcore.change`.
    """

    index: int
    name: str
    stores: tuple[RunStore, ...]
    bindings: tuple[Binding, ...]
    opened: int = field(default=0, init=False)
    version: int = field(default=0, init=False)

    @property
    def parameter_chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for store in self.stores for chunk in store.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's parameters, padding to pages included."""
        return sum(chunk.nbytes for chunk in self.parameter_chunks)


def resting(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A NaN of the given shape that occupies one element: of what has no more than one, an ordinary tensor."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 1  # integers know no NaN
    with allocating_on_device("what stands for a parameter", dtype.itemsize):
        one = torch.full((), value, dtype=dtype, device=device)
        return one.view(shape) if shape.numel() == 1 else one.expand(shape)
