"""A directory of checkpoints: the newest ones of a run."""

from __future__ import annotations

import re
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import files as seam
from outcore.checkpoint.files import reading
from outcore.checkpoint.load import load
from outcore.checkpoint.model import end_previous
from outcore.checkpoint.reader import opened, verify
from outcore.checkpoint.save import begin
from outcore.checkpoint.saving import Saving
from outcore.checkpoint.writer import discard, sweep
from outcore.errors import CheckpointError, DiskReadError, TierError, UsageError
from outcore.offloaded import engine_of

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})", re.ASCII)


class Checkpoints:
    """The checkpoints of one run, ``step-N`` in a directory of their own.

    Args:
        directory: made with the first checkpoint.
        keep: how many to keep; older ones are removed once a new one is committed. ``None`` keeps all. Those that
            `restore` passed over don't count, nor do those of later steps, which a run that went back comes by again.

    Raises:
        UsageError: ``keep`` is below 1.
    """

    def __init__(self, directory: str | PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"at least one checkpoint must be kept, not {keep}")
        self._directory = Path(directory)
        self._keep = keep
        self._passed: set[int] = set()
        self._last: Saving | None = None

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self._directory / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps of committed checkpoints, oldest first.

        Raises:
            DiskReadError: the directory can't be read.
        """
        if self._last is not None:
            self._last.finish()
        return self._steps()

    def _steps(self) -> list[int]:
        if not self._directory.exists():
            return []
        with reading(self._directory):
            names = seam.SYSTEM.names(self._directory)
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Any = None,
        *,
        wait: bool = False,
    ) -> Path:
        """Save a step as `outcore.save` does, then remove the oldest beyond ``keep``.

        Training can go on while it is written, unless ``wait`` is set. `wait` waits for it later, as do all other
        methods, the model's next save, load and `outcore.release`, and the end of the process.

        A damaged checkpoint of the same step is replaced, as a run that went back to an earlier one comes by
        again. One that is whole is not.

        Returns:
            The checkpoint's path.

        Raises:
            UsageError: there is a checkpoint of this step, and it is whole.
            DiskFullError, DiskWriteError, DiskReadError: the system refused. If that was while an old
                checkpoint was removed, the new one is in place all the same. What goes wrong while training
                goes on is raised by `wait`, and by the model's next step, save or `outcore.release`.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise UsageError(f"a step is a whole number, not {step!r}")
        engine = engine_of(model)
        end_previous(engine)
        path = self.path(step)
        with engine.ranks.together(f"the save of {path.name}"):
            if engine.ranks.number == 0 and path.is_dir() and not _is_whole(path):
                discard(path)
        saving = begin(path, model, optimizer, extra, wait, lambda: self._remove_older(step))
        if not wait:
            self._last = saving
        saving.go(wait)
        return path

    def wait(self) -> None:
        """Wait until the newest save is committed.

        Raises:
            DiskFullError, DiskWriteError, DiskReadError: what went wrong with it.
        """
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _remove_older(self, step: int) -> None:
        """Remove those before the newest ``keep``, now that this step is committed."""
        self._passed.discard(step)
        if self._keep is not None:
            steps = [other for other in self._steps() if other <= step]
            good = [other for other in steps if other not in self._passed]
            for other in steps:
                if other < min(good[-self._keep :]):
                    discard(self.path(other))

    def latest(self) -> Path | None:
        """The newest checkpoint whose manifest and files are there and fit together, if there is one."""
        for step in reversed(self.steps()):
            try:
                with opened(self.path(step)):
                    return self.path(step)
            except (CheckpointError, DiskReadError):
                continue
        return None

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[int, Any] | None:
        """Load the newest checkpoint that can be loaded; each damaged one gives a `RuntimeWarning`.

        What dead writers left in the directory is removed first, as it is by each save.

        Returns:
            Its step and its ``extra``, or ``None`` if there is no checkpoint at all.

        Raises:
            CheckpointError, DiskReadError: there are some and none can be loaded: that of the newest.
            ModelError, StateError: see `outcore.load`.
        """
        engine = engine_of(model)
        end_previous(engine)
        with engine.ranks.together("the search for a checkpoint"):
            if engine.ranks.number == 0:
                sweep(seam.SYSTEM, self._directory)
            steps = self.steps()
        failure: TierError | None = None
        for step in reversed(steps):
            try:
                return step, load(self.path(step), model, optimizer)
            except (CheckpointError, DiskReadError) as error:
                failure = failure or error
                self._passed.add(step)
                warnings.warn(f"a checkpoint is passed over: {error}", RuntimeWarning, stacklevel=2)
        if failure is not None:
            raise failure
        return None


def _is_whole(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True
