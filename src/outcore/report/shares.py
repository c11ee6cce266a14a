"""What a recorded step adds up to: how long each resource was busy, and what each tier held when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outcore.report.timeline import Level, Record, Span


def busy(spans: Iterable[Span], start: float, stop: float) -> float:
    """Seconds between ``start`` and ``stop`` in which at least one span runs."""
    total, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        begin, end = max(span.start, reached), min(span.stop, stop)
        if end > begin:
            total += end - begin
            reached = end
    return total


def outside(record: Record) -> list[Span]:
    """When the CPU, where it computes, is in no unit, no update and no wait: loss, gradient norm, data, hooks."""
    reached, found = record.start, []
    spans = [s for s in record.spans if s.track in ("forward", "backward", "read", "update", "waiting")]
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > reached:
            found.append(Span("outside", "units: loss, gradient norm, data", reached, span.start))
        reached = max(reached, span.stop)
    if reached < record.stop:
        found.append(Span("outside", "units: loss, gradient norm, data", reached, record.stop))
    return found


@dataclass(frozen=True)
class Use:
    """What a resource did within a step.

    Attributes:
        seconds: of the step in which it was busy.
        nbytes: that crossed it, of all that was begun within the step.
        taken: seconds in which they crossed, also after the step.
    """

    seconds: float
    nbytes: int
    taken: float


def uses(record: Record) -> dict[str, Use]:
    """Each track's use, of those that have any."""
    tracks: dict[str, list[Span]] = {}
    for span in record.spans:
        if span.start < record.stop:  # else it was read ahead for the next step
            tracks.setdefault(span.track, []).append(span)
    return {
        track: Use(
            busy(spans, record.start, record.stop),
            sum(span.nbytes for span in spans),
            busy(spans, -math.inf, math.inf),
        )
        for track, spans in tracks.items()
    }


def by_unit(record: Record) -> list[tuple[str, Mapping[str, float]]]:
    """Seconds of each unit by track (forward, backward), the longest first."""
    found: dict[str, dict[str, float]] = {}
    for span in record.spans:
        if span.track in ("forward", "backward"):
            unit = found.setdefault(span.name, {})
            unit[span.track] = unit.get(span.track, 0.0) + span.seconds
    return sorted(found.items(), key=lambda item: -sum(item[1].values()))


@dataclass(frozen=True)
class Held:
    """What a tier holds from ``at`` on, in seconds from the beginning of the step, by kind."""

    at: float
    kinds: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.kinds)


ORDER = ("parameters", "gradients", "optimizer states", "activations", "other")
"""From the bottom of the picture to its top."""


@dataclass(frozen=True)
class Filling:
    """A tier over a step.

    Attributes:
        kinds: the names, in the order of `Held.kinds`.
        states: in order of time; the first is at 0.
        budget: 0 where none is known.
    """

    tier: str
    kinds: tuple[str, ...]
    states: tuple[Held, ...]
    budget: int

    @property
    def peak(self) -> Held:
        return max(self.states, key=lambda held: held.total)


def fillings(record: Record, most: int) -> list[Filling]:
    """Each tier in use, with at most ``most`` states, the highest of each stretch of time among them."""
    found = []
    for tier in ("device", "host", "disk"):
        levels = [level for level in record.levels if level.tier == tier]
        if not any(level.nbytes for level in levels):
            continue
        seen = dict.fromkeys(level.kind for level in levels)
        kinds = (*(k for k in ORDER if k in seen), *(k for k in seen if k not in ORDER))
        states = _states(levels, kinds, record)
        found.append(
            Filling(tier, kinds, tuple(_thinned(states, record.seconds, most)), record.budget.get(tier, 0))
        )
    return found


def _states(levels: Sequence[Level], kinds: Sequence[str], record: Record) -> list[Held]:
    now = dict.fromkeys(kinds, 0)
    states: list[Held] = []
    for level in levels:
        if level.at > record.stop:
            break
        now[level.kind] = max(0, level.nbytes)
        at = max(0.0, level.at - record.start)
        state = Held(at, tuple(now.values()))
        if at == 0.0 and states:
            states[0] = state
        else:
            states.append(state)
    return states or [Held(0.0, tuple(now.values()))]


def _thinned(states: list[Held], seconds: float, most: int) -> list[Held]:
    """Of each of ``most / 2`` stretches of time, the highest state and the last."""
    if len(states) <= most:
        return states
    stretches: dict[int, list[Held]] = {}
    for state in states:
        stretches.setdefault(int(state.at / seconds * most / 2), []).append(state)
    kept = []
    for members in stretches.values():
        highest = max(members, key=lambda held: held.total)
        kept += [highest] if highest is members[-1] else [highest, members[-1]]
    return kept
