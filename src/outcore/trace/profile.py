"""What a lap allocates beside chunks, window by window.

A window reaches from one opening or closing of a unit to the next. The activations of a lap peak at its loss, where
no block is open; the largest unit is open where few activations are alive. A budget that holds each window need
not hold the largest of one and the largest of the other together, and must not be asked to.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from outcore.trace.extents import Extents

AHEAD = 6
"""Windows whose needs are kept free of what is read ahead."""


@dataclass
class Profile:
    """One kind of lap.

    Attributes:
        inputs: shapes of the inputs it was measured with.
        keys: what opened each window.
        peaks: bytes allocated in each window at its peak.
    """

    inputs: Extents = ()
    keys: list[Hashable] = field(default_factory=lambda: [None])
    peaks: list[int] = field(default_factory=lambda: [0])

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def note(self, peak: int) -> None:
        """The window that is open now reached ``peak``."""
        self.peaks[-1] = max(self.peaks[-1], peak)

    def open(self, key: Hashable) -> None:
        """A new window."""
        self.keys.append(key)
        self.peaks.append(0)

    def find(self, key: Hashable, position: int) -> int | None:
        """The first window with this key from ``position`` on."""
        try:
            return self.keys.index(key, position)
        except ValueError:
            return None

    def around(self, position: int) -> tuple[int, int]:
        """The needs of the window at ``position``, and the most of it and the next ones."""
        return self.peaks[position], max(self.peaks[position : position + AHEAD])
