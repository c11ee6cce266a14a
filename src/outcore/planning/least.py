"""The smallest budgets with which a run could work, from its trace and its layout."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.model.unit import Unit
from outcore.model.units import Point
from outcore.planning.minimum import needs
from outcore.planning.outcome import Limits
from outcore.planning.recorder import WITHIN
from outcore.planning.rehearsal import Trace


def least(
    units: Sequence[Unit], points: Sequence[Point], trace: Trace, occupied: int, on_host: bool
) -> Limits:
    """The least of each tier: what is pinned at the worst moment, beside the activations of that moment.

    ``disk`` is what is needed beside the least host budget.
    """
    found = needs(units, points, sliced=False)
    computing = 0
    opened: dict[int, int] = {}
    gradient = [_gradient(unit, on_host) for unit in units]
    for span in trace.spans:
        phase, index = span.event
        if phase in ("forward", "backward"):
            opened[index] = _bytes(units[index], on_host)
        pinned = sum(opened.values())
        if any(gradient[i] for i in opened) and trace_is_backward(phase):
            pinned += max(gradient[i] for i in opened)
        if phase in WITHIN:
            pinned = max(pinned, sum(opened.values()) + gradient[index])
        computing = max(computing, span.peak + pinned + occupied)
        if phase == "closed":
            opened.pop(index, None)
    host = max(found.working, computing) if on_host else found.working
    reserved = trace.peak + occupied if on_host else 0
    return Limits(
        None if on_host else max(computing, found.device), host, max(0, found.total + reserved - host)
    )


def trace_is_backward(phase: str) -> bool:
    """Whether gradients may arrive after such an event."""
    return phase == "backward" or phase in WITHIN


def _bytes(unit: Unit, on_host: bool) -> int:
    return unit.nbytes if on_host else sum(store.run.nbytes for store in unit.stores)


def _gradient(unit: Unit, on_host: bool) -> int:
    """The largest that must be held of a unit's gradients at once: a chunk on the host, a run on a device."""
    if on_host:
        return max((chunk.nbytes for store in unit.stores for chunk in store.gradients), default=0)
    return max((store.run.nbytes for store in unit.stores if store.run.trained), default=0)
