"""What the steps of a run came to, in the memory of two of them: a run may take millions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outcore.report.step import Step


@dataclass
class Sums:
    """Sums over some steps in a row.

    Attributes:
        first: the number of the first.
        last: that of the last.
        seconds: of the steps, as are ``compute`` and ``update``.
        waited: seconds by link.
    """

    count: int = 0
    first: int = 0
    last: int = 0
    tokens: int = 0
    seconds: float = 0.0
    compute: float = 0.0
    update: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)

    def add(self, step: Step) -> None:
        """One more."""
        self.first = self.first if self.count else step.number
        self.last = step.number
        self.count += 1
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.compute += step.compute
        self.update += step.update
        for link, seconds in step.waited.items():
            self.waited[link] = self.waited.get(link, 0.0) + seconds


class Totals:
    """Of all steps of a run.

    Attributes:
        count: of steps.
        moved: bytes by link.

    Args:
        first: the first step.
    """

    def __init__(self, first: Step) -> None:
        self.first = self.last = first
        self.count = 0
        self.moved: Counter[str] = Counter()
        self._opening, self._steady = Sums(), Sums()
        self.add(first)

    @property
    def steady(self) -> Sums:
        """Of all but the first, in which orders are recorded and kernels compiled; of that where there is no other."""
        return self._steady if self._steady.count else self._opening

    def add(self, step: Step) -> None:
        """One more."""
        (self._steady if self.count else self._opening).add(step)
        self.count += 1
        self.last = step
        self.moved.update(step.moved)
