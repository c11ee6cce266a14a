"""Whoever needs chunks as a step left them, and is asked before the next one changes them: a save under way."""

from __future__ import annotations

from typing import Protocol

from outcore.optim.due import Update


class Preserver(Protocol):
    """Called for each update, by the thread that does it. No method but `report` raises what went wrong."""

    def is_ready(self, update: Update) -> bool:
        """Whether `preserve` could do without other chunks. Never waits."""

    def prepare(self, update: Update) -> None:
        """On the training thread, with nothing of the update guarded: make it ready."""

    def preserve(self, update: Update) -> None:
        """The update's chunks are guarded and about to change."""

    def completed(self, update: Update) -> None:
        """The update is done."""

    def finish(self) -> None:
        """Wait until nothing is needed any more: whoever changes chunks without an update calls this first."""

    def report(self) -> None:
        """Raise what went wrong in the meantime, once."""


class Nobody:
    """Nobody needs anything."""

    def is_ready(self, update: Update) -> bool:
        return True

    def prepare(self, update: Update) -> None:
        pass

    def preserve(self, update: Update) -> None:
        pass

    def completed(self, update: Update) -> None:
        pass

    def finish(self) -> None:
        pass

    def report(self) -> None:
        pass
