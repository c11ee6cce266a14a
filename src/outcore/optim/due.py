"""A step as it was called, and what it does to one chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from outcore.chunks.chunk import Chunk
from outcore.chunks.store import RunStore
from outcore.optim.collected import Collected
from outcore.optim.kernels import GradTransform


@dataclass(frozen=True)
class Due:
    """One optimizer step as it was called: later changes of a learning rate do not reach it.

    Attributes:
        hyper: the parameter groups' hyperparameters at the call.
        group_of: parameter index to group number.
        steps: parameter index to the number of its step, counted from 1.
        transform: unscaling and clipping, applied to each gradient as it is used.
    """

    hyper: Sequence[Mapping[str, object]]
    group_of: Mapping[int, int]
    steps: Mapping[int, int]
    transform: GradTransform = field(default_factory=GradTransform)


class Progress(Enum):
    """How far an update is."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    """Somebody is doing it."""
    DONE = "done"
    """Its bytes are as the step leaves them."""
    FAILED = "failed"
    """The arithmetic raised; it can't be done again."""


@dataclass(eq=False)
class Update:
    """One chunk's update in one step.

    Attributes:
        progress: changed under the lock of the pipeline.
        ticked: its unit was asked for. Only the training thread changes it, under the lock of the pool.
        error: what made it fail.
    """

    due: Due
    collected: Collected
    store: RunStore
    k: int
    progress: Progress = Progress.WAITING
    ticked: bool = False
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.progress is Progress.DONE

    @property
    def key(self) -> tuple[str, str, int]:
        return ("update", self.store.name, self.k)

    @property
    def gradient(self) -> Chunk:
        return self.collected.chunk(self.store, self.k)

    @property
    def written(self) -> tuple[Chunk, ...]:
        """The chunks that the update changes."""
        return (self.store.parameters[self.k], *self.store.states[self.k : self.k + 1])
