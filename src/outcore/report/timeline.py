"""What happened when within a step: an observer of the ledger that keeps spans and levels in bounded memory.

[Note: Whose clock]
What the CPU does is timed by a clock of the host. What a device does is timed by events on its streams, read
once the step is over; one event that the host has waited for, when the recording began, ties the two together. A device
whose events know no time is timed as the host sees it: then a copy seems over when it has been submitted, and
`Record.exact` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from outcore.errors import StateError
from outcore.memory.ledger import Ledger
from outcore.memory.observer import Mark, Track, Where

LIMIT = 200_000
"""The most spans, and the most levels, that are kept of one step: about 60 MB."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from ``start`` to ``stop``, in seconds of the record's clock.

    Attributes:
        track: what kind of thing, one of `outcore.memory.observer.TRACKS`.
        name: of the unit, the chunk or the link.
        nbytes: that crossed the link, or 0.
    """

    track: str
    name: str
    start: float
    stop: float
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Level:
    """From ``at`` on, in seconds, a tier holds ``nbytes`` of a kind."""

    at: float
    tier: str
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Record:
    """One step.

    Attributes:
        number: of the step.
        start, stop: its begin and end, in seconds of a clock that all steps of a timeline share.
        spans: by their start. What the step began and did not wait for, such as a write, may end after ``stop``; what
            is read ahead for the next step may begin after it.
        levels: in order; each tier's first ones say what was there when the recording began.
        budget: bytes per tier.
        dropped: spans and levels beyond the limit.
        exact: whether a device's work is timed by the device.
    """

    number: int
    start: float
    stop: float
    spans: tuple[Span, ...]
    levels: tuple[Level, ...]
    budget: Mapping[str, int]
    dropped: int = 0
    exact: bool = True

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass
class _Raw:
    """What is heard during one step, before marks are resolved."""

    spans: list[tuple[Track, str, Mark, Mark, int]] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    dropped: int = 0


class Timeline:
    """Records steps. Implements `outcore.memory.observer.Observer`.

    Args:
        ledger: of the engine that is watched.
        device: that computes.
        settle: called after a recorded step, to wait for transfers that it left under way.
        clock: seconds, of the host.
        limit: the most spans, and the most levels, of one step.

    Attributes:
        records: one per step, in the order in which they were taken.
    """

    def __init__(
        self,
        ledger: Ledger,
        device: torch.device,
        *,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        limit: int = LIMIT,
    ) -> None:
        self.records: list[Record] = []
        self._ledger = ledger
        self._device = device
        self._settle = settle
        self._clock = clock
        self._limit = limit
        self._zero = clock()
        self._raw: _Raw | None = None
        self._tie: tuple[float, torch.Event] | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block as a step; one that raises leaves no record.

        Raises:
            StateError: a step is being recorded already.
        """
        if self._ledger.observed:
            raise StateError("a step of this model is being recorded already")
        raw = self._raw = _Raw()
        self._tie = self._synchronize()
        start = self._clock()
        self._ledger.observe(self)
        try:
            yield
            stop = self._clock()
            self._settle()
        finally:
            self._ledger.observe(None)
            self._raw = None
        self.records.append(self._resolved(number, raw, start, stop))

    # -- the observer -----------------------------------------------------------------------------

    def mark(self, where: Where) -> Mark:
        if self._tie is None or not isinstance(where, torch.device | torch.Stream):
            return self._clock()
        if isinstance(where, torch.device) and where.type == "cpu":
            return self._clock()
        stream = torch.accelerator.current_stream(where) if isinstance(where, torch.device) else where
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream)
        return event

    def span(self, track: Track, name: str, start: Mark, stop: Mark, nbytes: int) -> None:
        raw = self._raw
        if raw is None:
            return
        if len(raw.spans) < self._limit:
            raw.spans.append((track, name, start, stop, nbytes))
        else:
            raw.dropped += 1

    def level(self, tier: str, kind: str, nbytes: int) -> None:
        raw = self._raw
        if raw is None:
            return
        if len(raw.levels) < self._limit:
            raw.levels.append(Level(self._clock() - self._zero, tier, kind, nbytes))
        else:
            raw.dropped += 1

    # -- marks ------------------------------------------------------------------------------------

    def _synchronize(self) -> tuple[float, torch.Event] | None:
        """An event and the host's time when it was passed; nothing where no event tells time."""
        if self._device.type == "cpu":
            return None
        try:
            event = torch.Event(self._device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self._device))
            event.synchronize()
            now = self._clock()
            event.elapsed_time(event)
        except (RuntimeError, NotImplementedError):
            return None
        return now, event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, torch.Event):
            assert self._tie is not None
            then, event = self._tie
            return then + float(event.elapsed_time(mark)) / 1e3 - self._zero
        return mark - self._zero

    def _resolved(self, number: int, raw: _Raw, start: float, stop: float) -> Record:
        if self._tie is not None:
            torch.accelerator.synchronize(self._device)
        spans = [
            Span(track, name, self._seconds(began), self._seconds(over), nbytes)
            for track, name, began, over, nbytes in raw.spans
        ]
        return Record(
            number,
            start - self._zero,
            stop - self._zero,
            tuple(sorted(spans, key=lambda span: span.start)),
            tuple(raw.levels),
            dict(self._ledger.snapshot().budget),
            raw.dropped,
            self._device.type == "cpu" or self._tie is not None,
        )
