"""What every tier holds, what every link moved, and where the time went.

One `Ledger` belongs to one engine. Lower rooms write into it as they act; nobody reads it to decide
anything except the pool, which compares what the host holds with its budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.profiler import record_function

from outcore.memory.observer import Mark, Observer, Track, Where

Tier = Literal["device", "host", "disk"]
Link = Literal["disk read", "disk write", "device in", "device out", "wire"]
Activity = Literal["compute", "update"]

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
LINKS: tuple[Link, ...] = ("disk read", "disk write", "device in", "device out")
WIRE: Link = "wire"
"""The link to other ranks, by bytes received. It is listed where there are any."""

OTHER = "other"
"""The kind of bytes of which nobody said what they are."""


_BESIDE = ContextVar("beside", default=False)


@contextmanager
def beside() -> Iterator[None]:
    """Inside, on this thread, nobody trains: what is waited for keeps the training thread from nothing."""
    token = _BESIDE.set(True)
    try:
        yield
    finally:
        _BESIDE.reset(token)


@dataclass(frozen=True)
class Snapshot:
    """The ledger at one moment. Counters only grow, so two snapshots subtract.

    Attributes:
        held: bytes a tier holds now.
        peak: the most bytes a tier has held since the ledger was opened (or since `Ledger.reset_peaks`).
        budget: bytes a tier may hold; tiers that are not used are absent.
        moved: bytes that crossed each link.
        waited: seconds the training thread stood still for each link.
        spent: seconds the training thread spent in each activity other than waiting.
        kinds: `held` by what the bytes are; what is on disk and on the host is held by both.
    """

    held: Mapping[str, int]
    peak: Mapping[str, int]
    budget: Mapping[str, int]
    moved: Mapping[str, int]
    waited: Mapping[str, float]
    spent: Mapping[str, float]
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass
class Ledger:
    """Thread-safe counters. All sizes in bytes, all times in seconds.

    An `Observer`, if there is one, hears of everything when it happens; see `observe`.
    """

    budget: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    _peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    _moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    _waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    _spent: dict[str, float] = field(default_factory=dict)
    _kinds: dict[tuple[str, str], int] = field(default_factory=dict)
    _observer: Observer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, tier: Tier, nbytes: int, kind: str = OTHER) -> None:
        """Add ``nbytes`` (negative to give back) of a kind to what ``tier`` holds."""
        with self._lock:
            now = self._held[tier] + nbytes
            self._held[tier] = now
            self._peak[tier] = max(self._peak[tier], now)
            of_kind = self._kinds[tier, kind] = self._kinds.get((tier, kind), 0) + nbytes
            if self._observer is not None:
                self._observer.level(tier, kind, of_kind)

    def clear(self, tier: Tier) -> None:
        """A tier is closed: it holds nothing any more, of no kind."""
        with self._lock:
            held = {kind: nbytes for (at, kind), nbytes in self._kinds.items() if at == tier and nbytes}
        for kind, nbytes in held.items():
            self.hold(tier, -nbytes, kind)

    def touch_peak(self, tier: Tier, transient: int, kind: str = OTHER) -> None:
        """Note that ``tier`` held ``transient`` bytes beyond `held` for a moment."""
        with self._lock:
            self._peak[tier] = max(self._peak[tier], self._held[tier] + transient)
            if self._observer is not None and transient:
                of_kind = self._kinds.get((tier, kind), 0)
                self._observer.level(tier, kind, of_kind + transient)
                self._observer.level(tier, kind, of_kind)

    def list_link(self, link: Link) -> None:
        """From now on snapshots list a link that is not among `LINKS`."""
        with self._lock:
            self._moved.setdefault(link, 0)
            self._waited.setdefault(link, 0.0)

    def held(self, tier: Tier) -> int:
        return self._held[tier]

    def peak(self, tier: Tier) -> int:
        return self._peak[tier]

    def reset_peaks(self) -> None:
        with self._lock:
            self._peak.update(self._held)

    def moved(self, link: Link, nbytes: int) -> None:
        with self._lock:
            self._moved[link] += nbytes

    def spent(self, activity: Activity, seconds: float) -> None:
        with self._lock:
            self._spent[activity] = self._spent.get(activity, 0.0) + seconds

    @contextmanager
    def waiting(self, link: Link) -> Iterator[None]:
        """Time the block as waiting on ``link``, unless it is `beside` the training thread."""
        if _BESIDE.get():
            yield
            return
        start = time.perf_counter()
        began = self.mark()
        try:
            yield
        finally:
            with self._lock:
                self._waited[link] += time.perf_counter() - start
            self.span("waiting", link, began)

    # -- what happens when ------------------------------------------------------------------------

    def observe(self, observer: Observer | None) -> None:
        """Let somebody look on from now on, in place of whoever did; they hear first what every tier holds."""
        with self._lock:
            self._observer = observer
            if observer is not None:
                for (tier, kind), nbytes in self._kinds.items():
                    observer.level(tier, kind, nbytes)

    @property
    def observed(self) -> bool:
        """Whether somebody looks on."""
        return self._observer is not None

    def mark(self, where: Where = None) -> Mark | None:
        """The present moment, for `span`; ``None`` while nobody looks on."""
        observer = self._observer
        return None if observer is None else observer.mark(where)

    def span(self, track: Track, name: str, start: Mark | None, nbytes: int = 0, where: Where = None) -> None:
        """What began at ``start`` is over now."""
        observer = self._observer
        if observer is not None and start is not None:
            observer.span(track, name, start, observer.mark(where), nbytes)

    @contextmanager
    def doing(self, track: Track, name: str, where: Where = None, nbytes: int = 0) -> Iterator[None]:
        """Report the block as a span; a profiler that is active sees it as the range ``outcore: TRACK NAME``."""
        start = self.mark(where)
        try:
            if torch._C._autograd._profiler_enabled():
                with record_function(f"outcore: {track} {name}"):
                    yield
            else:
                yield
        finally:
            self.span(track, name, start, nbytes, where)

    @contextmanager
    def crossing(self, link: Link, name: str, where: Where, nbytes: int) -> Iterator[None]:
        """Count the block's copy, which a stream of the device makes, as bytes that crossed ``link``."""
        start = self.mark(where)
        yield
        self.moved(link, nbytes)
        self.span(link, name, start, nbytes, where)

    def snapshot(self) -> Snapshot:
        with self._lock:
            kinds: dict[str, dict[str, int]] = {}
            for (tier, kind), nbytes in self._kinds.items():
                kinds.setdefault(tier, {})[kind] = nbytes
            return Snapshot(
                held=dict(self._held),
                peak=dict(self._peak),
                budget=dict(self.budget),
                moved=dict(self._moved),
                waited=dict(self._waited),
                spent=dict(self._spent),
                kinds=kinds,
            )
