"""What one step was like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outcore.memory.ledger import Snapshot


@dataclass(frozen=True)
class Step:
    """One optimizer step, measured.

    Attributes:
        number: counted from 1.
        loss: mean over the step's micro-batches.
        lr: learning rate of the first parameter group.
        grad_norm: before clipping; ``None`` where nothing is clipped.
        tokens: in the step's batches.
        seconds: wall time from the first forward to the end of ``step()``.
        before: the ledger when it began.
        after: the ledger when it ended.
        nonfinite: the unit in which an inf or NaN appeared first, in the loss or in the gradients of this step.
        skipped: steps left out so far because a gradient was not finite.
    """

    number: int
    loss: float
    lr: float
    grad_norm: float | None
    tokens: int
    seconds: float
    before: Snapshot
    after: Snapshot
    skipped: int
    nonfinite: str | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def moved(self) -> Mapping[str, int]:
        """Bytes that crossed each link within the step."""
        return {link: nbytes - self.before.moved[link] for link, nbytes in self.after.moved.items()}

    @property
    def waited(self) -> Mapping[str, float]:
        """Seconds the training thread stood still for each link."""
        return {link: seconds - self.before.waited[link] for link, seconds in self.after.waited.items()}

    @property
    def wait_shares(self) -> Mapping[str, float]:
        """What part of the step the training thread stood still for each link, from 0 to 1."""
        return {link: seconds / self.seconds for link, seconds in self.waited.items()}

    @property
    def update(self) -> float:
        """Seconds in the optimizer's kernels and what surrounds them, without waiting."""
        return self.after.spent.get("update", 0.0) - self.before.spent.get("update", 0.0)

    @property
    def compute(self) -> float:
        """Seconds of forward and backward: what is neither waiting nor update."""
        return max(0.0, self.seconds - self.update - sum(self.waited.values()))
