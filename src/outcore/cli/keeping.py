"""The checkpoints of ``outcore train``: when one is due, what is in it, and how a run goes on from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outcore
from outcore.checkpoint.load import extra_of
from outcore.checkpoint.schema import Fields
from outcore.cli.identity import check_data, check_run
from outcore.cli.settings import EVERY, KEEP, Settings
from outcore.errors import CheckpointError, UsageError
from outcore.report.metrics import check_writable

if TYPE_CHECKING:
    from outcore.cli.batches import Batches
    from outcore.report.step import Step


@dataclass(frozen=True)
class Previous:
    """A checkpoint to go on from, as far as it was looked at before the model has any memory.

    Attributes:
        step: optimizer steps that were taken.
        extra: what `Keeping.save` kept beside the model.
        path: its directory.
    """

    step: int
    extra: dict[str, Any]
    path: Path

    @property
    def tokenizer(self) -> dict[str, str]:
        """The tokenizer's files by name."""
        found = self.extra.get("tokenizer")
        return found if isinstance(found, dict) else {}


class Keeping:
    """Saves a run in a series of checkpoints and finds where it was.

    Args:
        directory: of the checkpoints.
        every: steps between two.
        keep: how many stay.

    Raises:
        UsageError: the directory can't be used.
    """

    def __init__(self, directory: Path, every: int | None, keep: int | None) -> None:
        self.directory = directory
        self.every = EVERY if every is None else every
        self.keep = KEEP if keep is None else keep
        self.facts: dict[str, Any] = {}
        self.tokenizer: dict[str, str] = {}
        self._series = outcore.Checkpoints(directory, self.keep)
        self._saved = -1
        check_writable(directory, "checkpoint")

    @classmethod
    def of(cls, settings: Settings) -> Keeping | None:
        """What the flags ask for."""
        if settings.checkpoint is None:
            return None
        return cls(settings.checkpoint, settings.every, settings.keep)

    def previous(self, resume: bool, facts: dict[str, Any]) -> Previous | None:
        """The newest checkpoint whose files are whole, if the run is to go on and there is one.

        Args:
            resume: whether it is to go on.
            facts: `identity.facts` of this run, which each of its checkpoints carries from now on.

        Raises:
            UsageError: there are checkpoints and the run is not to go on, or they are of another run.
            CheckpointError, DiskReadError: there are some, and none is whole.
        """
        self.facts = facts
        steps = self._series.steps()
        if not steps:
            return None
        if not resume:
            raise UsageError(
                f"{self.directory} holds checkpoints already, the newest of step {steps[-1]}: give --resume to go on "
                "from it, or another --checkpoint"
            )
        path = self._series.latest()
        if path is None:
            outcore.verify(self._series.path(steps[-1]))  # says what is wrong with it
            raise CheckpointError(f"no checkpoint in {self.directory} can be read: give another --checkpoint")
        extra = extra_of(path)
        if not isinstance(extra, dict):
            raise UsageError(f"{path} was not written by outcore train: load it with outcore.load")
        check_run(extra, facts, path)
        return Previous(int(path.name.removeprefix("step-")), extra, path)

    def feed(self, data: dict[str, Any], tokenizer: dict[str, str], previous: Previous | None) -> None:
        """What the run trains on, which checkpoints hold; the one it goes on from must be of the same.

        Args:
            data: from `outcore.cli.identity.facts_of_data`.
            tokenizer: files by name.

        Raises:
            UsageError: it is of other data.
        """
        self.facts["data"], self.tokenizer = data, tokenizer
        if previous is not None:
            self._check_data(previous)

    def _check_data(self, previous: Previous) -> None:
        check_data(previous.extra.get("data"), self.facts["data"], previous.path)

    def restore(self, model: Any, optimizer: outcore.Optimizer, batches: Batches) -> Previous:
        """Load the newest checkpoint that can be loaded, and put the data where it was.

        Raises:
            UsageError: it is of another run.
            CheckpointError, DiskReadError: none can be loaded.
        """
        found = self._series.restore(model, optimizer)
        if found is None:
            raise CheckpointError(f"the checkpoints in {self.directory} are gone: start again")
        step, extra = found
        path = self._series.path(step)
        check_run(extra, self.facts, path)
        previous = Previous(step, extra, path)
        self._check_data(previous)
        batches.restore(_position(extra.get("batches")))
        self._saved = step
        return previous

    def due(self, step: int, last: int) -> bool:
        """Whether a step is one to save."""
        return step % self.every == 0 or step == last

    def save(self, step: Step, model: Any, optimizer: outcore.Optimizer, batches: Batches) -> None:
        """Save the run as it is after a step, while the next ones are taken.

        Raises:
            DiskFullError, DiskWriteError: the system refused, now or at the save before; earlier checkpoints are
                intact.
        """
        extra = {
            **self.facts,
            "batches": batches.state(),
            "tokenizer": self.tokenizer,
            "loss": step.loss,
        }
        self._series.save(step.number, model, optimizer, extra)
        self._saved = step.number

    def finish(self) -> None:
        """Wait until the last save is committed.

        Raises:
            DiskFullError, DiskWriteError: the system refused; earlier checkpoints are intact.
        """
        self._series.wait()

    @property
    def saved(self) -> int | None:
        """The step of the newest checkpoint that this run wrote or came from."""
        return self._saved if self._saved >= 0 else None


def _position(stored: Any) -> dict[str, int]:
    fields = Fields(stored, "the position in the data")
    return {key: fields.count(key) for key in ("seed", "epoch", "position")}
