"""What is still due, as those see it who use parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from outcore.chunks.replacers import NEVER
from outcore.chunks.store import RunStore
from outcore.optim.due import Update
from outcore.optim.preserver import Nobody, Preserver


class Updates(Protocol):
    """What is still due, as those see it who use parameters.

    Attributes:
        preserver: who is asked before a chunk changes.
    """

    preserver: Preserver

    @property
    def outstanding(self) -> bool:
        """Whether any unit is still to be asked for since the last step."""

    def is_due(self, stores: Iterable[RunStore]) -> bool:
        """Whether any of them is not up to date now."""

    def settle(self, stores: Iterable[RunStore]) -> None:
        """Bring them up to date."""

    def finish(self) -> None:
        """Bring everything up to date."""

    def forget(self) -> None:
        """Do no more of what is due: all parameters and states are about to be replaced."""

    def pending(self) -> Sequence[Update]:
        """The updates that are not done."""

    def do_beside(self, update: Update, beyond: int = NEVER) -> None:
        """On a thread that does not train: do an update, unless somebody does it or there is no room for a while.

        Args:
            beyond: see `outcore.chunks.pool.Pool.guard_if_room`.

        Raises:
            TierError: its chunks can't be read; nothing of it was done.
        """


class NoUpdates:
    """Parameters that nothing trains are always up to date."""

    outstanding = False

    def __init__(self) -> None:
        self.preserver: Preserver = Nobody()

    def is_due(self, stores: Iterable[RunStore]) -> bool:
        return False

    def settle(self, stores: Iterable[RunStore]) -> None:
        pass

    def finish(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def pending(self) -> Sequence[Update]:
        return ()

    def do_beside(self, update: Update, beyond: int = NEVER) -> None:
        pass
