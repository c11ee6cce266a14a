"""Who works beside the training thread of a simulated run: it takes from its speed."""

from __future__ import annotations

from typing import Protocol

FOREVER = 1e30
"""A moment that does not come."""


class Beside(Protocol):
    """Somebody who works beside the training thread."""

    @property
    def leaves(self) -> float:
        """The share of its speed that the training thread keeps now."""

    def next_end(self, now: float, shared: bool) -> float:
        """When the work under way is over, if all stays as it is; `FOREVER` if there is none.

        Args:
            shared: the training thread works, too.
        """

    def work(self, seconds: float, shared: bool) -> None:
        """So much time passes; ``shared`` likewise."""

    def look(self) -> None:
        """Something may have happened: go on."""


class Nobody:
    """No one."""

    leaves = 1.0

    def next_end(self, now: float, shared: bool) -> float:
        return FOREVER

    def work(self, seconds: float, shared: bool) -> None:
        """Nothing to do."""

    def look(self) -> None:
        """Nothing to do."""
