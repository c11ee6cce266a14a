"""What a simulated run is given and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Budgets in bytes; ``device`` is ``None`` where the host computes."""

    device: int | None
    host: int
    disk: int


@dataclass(frozen=True)
class Outcome:
    """What a simulated run came to.

    Attributes:
        seconds: of a step.
        compute: seconds of forward and backward in it.
        update: seconds of the update in it.
        waited: seconds that training stood still, by link.
        busy: seconds that each link worked.
        moved: bytes that crossed each link.
        peak: the most bytes each tier held in the whole run, its first step included.
        settled: the most bytes each tier held after the first step.
    """

    seconds: float
    compute: float
    update: float
    waited: Mapping[str, float]
    busy: Mapping[str, float]
    moved: Mapping[str, int]
    peak: Mapping[str, int]
    settled: Mapping[str, int]
