"""The ticks of one step, in the order in which a run comes by them."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.planning.fake_step import Trace
from outcore.planning.pieces import StorePieces
from outcore.planning.route import Tick
from outcore.planning.saved import SavedPieces

Stores = Sequence[Sequence[StorePieces]]
"""Units, and the runs of each."""


def laps(trace: Trace, stores: Stores, saved: SavedPieces, accumulate: int, wide: bool) -> list[list[Tick]]:
    """The laps of a step: a forward with its backward, so many times; the first with the updates of the step before.

    Args:
        saved: what blocks offload.
        accumulate: forwards and backwards of a step.
        wide: the laps after the first are believed to find gradients already summed (see `outcore.planning.route`).
    """
    later = [_lap(trace, stores, saved, wide)] * (accumulate - 1)
    return [_with_updates(_lap(trace, stores, saved, False), stores, accumulate > 1), *later]


def _lap(trace: Trace, stores: Stores, saved: SavedPieces, wide: bool) -> list[Tick]:
    lap: list[Tick] = []
    for number, span in enumerate(trace.spans):
        phase, unit = span.event
        if phase not in ("forward", "backward"):
            continue
        needs = [p for s in stores[unit] for p in s.parameters]
        if phase == "backward":
            needs += saved.read.get(number, [])
            needs += [p for s in stores[unit] for p in (s.totals if wide else s.gradients)]
        lap.append((span.event, tuple(needs)))
    return lap


def _with_updates(lap: Sequence[Tick], stores: Stores, summed: bool) -> list[Tick]:
    """Each unit's updates just before its first use; those of units that are not used, before the first backward."""
    found: list[Tick] = []
    waiting = dict.fromkeys(range(len(stores)))
    for tick in lap:
        phase, unit = tick[0]
        units = [unit] if phase == "forward" else list(waiting)
        for index in units:
            if index in waiting:
                del waiting[index]
                found += updates(stores, index, summed)
        found.append(tick)
    for index in waiting:
        found += updates(stores, index, summed)
    return found


def updates(stores: Stores, unit: int, summed: bool) -> list[Tick]:
    """The updates of a unit, chunk by chunk.

    Args:
        summed: gradients of several passes are in their fp32 sums.
    """
    return [
        (("update", unit), (gradient, s.parameters[k], *s.states[k : k + 1]))
        for s in stores[unit]
        for k, gradient in enumerate(s.totals if summed else s.gradients)
    ]
