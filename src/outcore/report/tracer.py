"""Records steps of a run, and keeps the file that they go to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from torch import nn

from outcore.errors import TierError
from outcore.offloaded import engine_of
from outcore.report.chrome import NAME, to_trace
from outcore.report.timeline import Record, Timeline


class Tracer:
    """Records some steps of a run and keeps ``trace.json`` up to date with them.

    Args:
        model: offloaded.
        directory: made when there is something to write.
        wanted: the steps to record.
    """

    def __init__(self, model: nn.Module, directory: Path, wanted: frozenset[int]) -> None:
        self._path = directory / NAME
        self._wanted = wanted
        self._timeline = timeline_of(model)
        self._written = 0

    def step(self, number: int) -> AbstractContextManager[None]:
        """What to run a step in; nothing for one that isn't wanted."""
        return self._timeline.step(number) if number in self._wanted else nullcontext()

    def write(self, *, more: bool = False) -> None:
        """Write what has been recorded since the file was written.

        Args:
            more: whether to leave it while the next step is going to be recorded too.

        Raises:
            TierError: it can't be written.
        """
        records = self._timeline.records
        if more and records and records[-1].number + 1 in self._wanted:
            return
        if len(records) > self._written:
            write(self._path, records)
            self._written = len(records)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.write()


@contextmanager
def record(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what an offloaded model does within the block: each use of a unit, each update, wait and transfer, and
    the bytes of each tier.

    When the block ends, all of it is written to ``path`` as a Chrome trace, for Perfetto. It is kept in memory
    until then, at most `outcore.report.timeline.LIMIT` spans: record a step or a few, not a run.

    Args:
        model: offloaded.
        path: the file, replaced if it is there; its directory is made.

    Raises:
        StateError: the model is not offloaded, or is being recorded already.
        TierError: the file can't be written.
    """
    timeline = timeline_of(model)
    with timeline.step(1):
        yield
    write(Path(path), timeline.records)


def timeline_of(model: nn.Module) -> Timeline:
    """A timeline of the engine behind a model."""
    engine = engine_of(model)
    return Timeline(engine.ledger, engine.stage.device, settle=engine.pool.quiesce)


def write(path: Path, records: list[Record]) -> None:
    """Write a trace; the file is there whole or as it was.

    Raises:
        TierError: it can't be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(to_trace(records), separators=(",", ":")), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise TierError(f"the trace can't be written to {path}: {error.strerror or error}") from None
