"""A chunk: the piece that moves between host and disk, and the states it can be in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from outcore.memory.disk import Extent
from outcore.memory.place import Place


class Kind(Enum):
    """What a chunk's bytes mean. The pool treats all kinds alike; reports tell them apart."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    STATE = "optimizer states"
    ACTIVATION = "activations"


class Residence(Enum):
    """Where the valid bytes of a chunk are.

    ======== ========================================== ============ ============
    state    meaning                                    host bytes   disk bytes
    ======== ========================================== ============ ============
    EMPTY    never written, or discarded: reads as zero none         none
    DISK     valid on disk alone                        none         extent
    READING  being read into the host                   charged      extent
    CLEAN    the same on host and disk                  charged      extent
    DIRTY    valid on the host alone                    charged      maybe, stale
    WRITING  valid on the host, being written to disk   charged      extent
    ======== ========================================== ============ ============
    """

    EMPTY = "empty"
    DISK = "disk"
    READING = "reading"
    CLEAN = "clean"
    DIRTY = "dirty"
    WRITING = "writing"


LEGAL: dict[Residence, frozenset[Residence]] = {
    Residence.EMPTY: frozenset({Residence.DIRTY}),
    Residence.DISK: frozenset({Residence.READING, Residence.DIRTY, Residence.EMPTY}),
    Residence.READING: frozenset({Residence.CLEAN, Residence.DISK}),
    Residence.CLEAN: frozenset({Residence.DISK, Residence.DIRTY, Residence.EMPTY}),
    Residence.DIRTY: frozenset({Residence.WRITING, Residence.DISK, Residence.EMPTY}),
    Residence.WRITING: frozenset({Residence.CLEAN, Residence.DIRTY}),
}
"""From each state, the states it may go to. A failed transfer, or guard, goes back to where it came from."""

ON_HOST = frozenset({Residence.READING, Residence.CLEAN, Residence.DIRTY, Residence.WRITING})


@dataclass(eq=False)
class Chunk:
    """A piece of memory with a place on the host and, once written out, an extent on disk.

    Only the `Pool` changes the fields below `region`, and only under its lock.

    Attributes:
        kind: what the bytes mean.
        name: for messages, e.g. ``"transformer.h.3 parameters 1/2"``.
        region: the chunk's pages; `Place.release` gives their bytes back.
    """

    kind: Kind
    name: str
    region: Place
    residence: Residence = Residence.EMPTY
    extent: Extent | None = None
    pins: int = 0
    last_use: int = 0
    error: BaseException | None = field(default=None, repr=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.region.nbytes

    @property
    def on_host(self) -> bool:
        return self.residence in ON_HOST

    @property
    def moving(self) -> bool:
        """Whether a transfer of it is under way."""
        return self.residence is Residence.READING or self.residence is Residence.WRITING

    @property
    def ready(self) -> bool:
        """Whether a guard for reading would not wait."""
        return self.on_host and self.residence is not Residence.READING

    def move(self, to: Residence) -> None:
        """Change the state; an illegal transition is a fault of the pool."""
        assert to in LEGAL[self.residence], f"{self.name}: {self.residence.value} -> {to.value}"
        self.residence = to
