"""A line of JSON per step, and the same for TensorBoard where it is installed.

Each line of ``metrics.jsonl`` is an object with

- ``step``, ``loss`` (as computed, not rounded), ``lr``, ``grad_norm`` (null without clipping), ``tokens``,
  ``seconds``, ``tokens_per_second``, ``skipped``, ``nonfinite`` (a unit's name, or null);
- ``held``, ``peak``, ``budget``: bytes per tier; the peak is that of the whole run so far;
- ``moved``, ``waited``: bytes and seconds per link within the step;
- ``compute``, ``update``: seconds within the step.

A number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from outcore.errors import TierError, UsageError
from outcore.report.step import Step

NAME = "metrics.jsonl"


class Metrics:
    """Writes each step as it ends. The directory is made with the first one, so a run that fails makes none.

    A ``metrics.jsonl`` of an earlier run is kept as ``metrics.jsonl.1`` (or ``.2`` and so on).

    Args:
        directory: where to write.
        after: the step and the loss from which a run goes on. If the file has a line of just that, it is continued:
            lines of later steps, which the run is about to take again, are cut off.

    Raises:
        UsageError: nothing can be written there.
    """

    def __init__(self, directory: Path, after: tuple[int, float] | None = None) -> None:
        self.directory = directory
        self._after = after
        self._file: Any = None
        self._board: Any = None
        check_writable(directory, "log")

    def write(self, step: Step) -> None:
        """Add one step.

        Raises:
            TierError: it can't be written.
        """
        try:
            if self._file is None:
                self._open()
            self._file.write(json.dumps(_plain(row(step)), allow_nan=False) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in scalars(step).items():
                    self._board.add_scalar(name, value, step.number)
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise TierError(f"the metrics can't be written to {self.directory}: {reason}") from None

    def close(self) -> None:
        for open_file in (self._file, self._board):
            if open_file is not None:
                with suppress(OSError):  # what can't be flushed has been told of when it was written
                    open_file.close()
        self._file = self._board = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / NAME
        goes_on = self._after is not None and path.is_file() and _cut(path, *self._after)
        if not goes_on:
            set_aside(path)
        self._file = path.open("a" if goes_on else "x", encoding="utf-8")
        if has_tensorboard():
            from torch.utils.tensorboard import SummaryWriter

            purge = None if self._after is None else self._after[0] + 1
            self._board = SummaryWriter(str(self.directory), purge_step=purge)


def set_aside(path: Path) -> None:
    """Give a file of an earlier run, if there is one, the first free name of ``path.1``, ``path.2`` and so on."""
    if path.exists():
        number = 1
        while (older := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(older)


def has_tensorboard() -> bool:
    """Whether TensorBoard's files can be written."""
    return find_spec("tensorboard") is not None


def row(step: Step) -> dict[str, Any]:
    """What a line of ``metrics.jsonl`` says."""
    return {
        "step": step.number,
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "tokens": step.tokens,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "skipped": step.skipped,
        "nonfinite": step.nonfinite,
        "held": dict(step.after.held),
        "peak": dict(step.after.peak),
        "budget": dict(step.after.budget),
        "moved": dict(step.moved),
        "waited": dict(step.waited),
        "compute": step.compute,
        "update": step.update,
    }


def scalars(step: Step) -> dict[str, float]:
    """The same for TensorBoard: one name per curve, numbers only; and the share of the step that waits, by link."""
    found: dict[str, float] = {}
    for name, value in row(step).items():
        if name in ("step", "nonfinite") or value is None:
            continue
        if isinstance(value, dict):
            found.update({f"{name}/{part}".replace(" ", "_"): float(v) for part, v in value.items()})
        else:
            found[name] = float(value)
    shares = step.wait_shares
    found["wait_share/total"] = sum(shares.values())
    found.update({f"wait_share/{link}".replace(" ", "_"): share for link, share in shares.items()})
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: Path, step: int, loss: float) -> bool:
    """End a file of metrics after a step, if it has the line of that step with that loss."""
    end = 0
    last: Any = None
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
                if not line.endswith(b"\n") or found["step"] > step:
                    break
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            last, end = found, end + len(line)
    if last is None or last["step"] != step or last.get("loss") != _plain(loss):
        return False
    os.truncate(path, end)
    return True


def check_writable(directory: Path, what: str) -> None:
    """Check that a directory is there, or can be made, and can be written.

    Args:
        what: it is for, for messages.

    Raises:
        UsageError: it is not.
    """
    there = directory.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UsageError(f"the {what} directory {directory} can't be made: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"the {what} directory {directory} can't be written: no permission in {there}")
