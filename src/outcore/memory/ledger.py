"""What every tier holds, what every link moved, and where the time went.

One `Ledger` belongs to one engine. Lower rooms write into it as they act; nobody reads it to decide
anything except the pool, which compares what the host holds with its budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Tier = Literal["device", "host", "disk"]
Link = Literal["disk read", "disk write", "device in", "device out"]
Activity = Literal["compute", "update"]

TIERS: tuple[Tier, ...] = ("device", "host", "disk")
LINKS: tuple[Link, ...] = ("disk read", "disk write", "device in", "device out")


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
    """

    held: Mapping[str, int]
    peak: Mapping[str, int]
    budget: Mapping[str, int]
    moved: Mapping[str, int]
    waited: Mapping[str, float]
    spent: Mapping[str, float]


@dataclass
class Ledger:
    """Thread-safe counters. All sizes in bytes, all times in seconds."""

    budget: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    _peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    _moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LINKS, 0))
    _waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LINKS, 0.0))
    _spent: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, tier: Tier, nbytes: int) -> None:
        """Add ``nbytes`` (negative to give back) to what ``tier`` holds."""
        with self._lock:
            now = self._held[tier] + nbytes
            self._held[tier] = now
            self._peak[tier] = max(self._peak[tier], now)

    def touch_peak(self, tier: Tier, transient: int) -> None:
        """Note that ``tier`` held ``transient`` bytes beyond `held` for a moment."""
        with self._lock:
            self._peak[tier] = max(self._peak[tier], self._held[tier] + transient)

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
        """Time the block as waiting on ``link``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._waited[link] += time.perf_counter() - start

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(
                held=dict(self._held),
                peak=dict(self._peak),
                budget=dict(self.budget),
                moved=dict(self._moved),
                waited=dict(self._waited),
                spent=dict(self._spent),
            )
