"""The smallest budgets with which a run could work, from its trace and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.chunks.store import RunStore
from outcore.memory.host import PAGE
from outcore.memory.sizes import format_size
from outcore.model.unit import Unit
from outcore.model.units import Point
from outcore.planning.fake_step import Trace
from outcore.planning.minimum import bytes_of, needs
from outcore.planning.outcome import Limits
from outcore.planning.recorder import WITHIN


@dataclass(frozen=True)
class Least:
    """What a run holds at its worst moments, in bytes.

    Attributes:
        device: pinned there, beside the activations of that moment; ``None`` where the host computes.
        host: likewise.
        whole: on host and disk together: what exists then, pinned or not.
    """

    device: int | None
    host: int
    whole: int

    @property
    def limits(self) -> Limits:
        """The least of each tier; ``disk`` is what is needed beside the least host budget."""
        return Limits(self.device, self.host, max(0, self.whole - self.host))


def least(
    units: Sequence[Unit],
    points: Sequence[Point],
    trace: Trace,
    occupied: int,
    on_host: bool,
    accumulate: int = 1,
) -> Least:
    """The least with which each moment of a step has room.

    Args:
        occupied: bytes of buffers and resting tensors where the model computes.
        accumulate: forwards and backwards of a step.
    """
    found = needs(units, points, sliced=bool(trace.wide))
    gradient = [_gradient(unit, on_host, accumulate > 1, unit.index in trace.wide) for unit in units]
    occupied += PAGE  # scalars that autograd makes by itself, which a trace doesn't see
    computing, reserved, opened = 0, 0, dict[int, int]()
    for span in trace.spans:
        phase, index = span.event
        if phase in ("forward", "backward"):
            opened[index] = _opened(units[index], on_host)
        pinned = sum(opened.values())
        if opened and _is_backward(phase):
            pinned += max(gradient[i] for i in opened)
        pinned += max([nbytes for _, nbytes in span.stored], default=0) if on_host else 0
        if phase in WITHIN:
            pinned = max(pinned, sum(opened.values()) + gradient[index])
        reserved = max(reserved, span.peak)  # what the first lap set aside stays so until its end
        computing = max(computing, reserved + pinned + span.shown + occupied)
        if phase == "closed":
            opened.pop(index, None)
    whole = max(found.total, _whole(units, trace, occupied, on_host, accumulate))
    if on_host:
        return Least(None, max(found.working, computing), whole)
    return Least(max(computing, found.device), max(found.working, _leaving(trace)), whole)


def shortage(low: Limits, whole: int, limits: Limits) -> tuple[str, int, int] | None:
    """The tier on which budgets are too small, what is needed there, and the budget; ``None`` if they are not.

    Args:
        low: `Least.limits`.
        whole: `Least.whole`. Without a disk all of it must be on the host.
    """
    if limits.device is not None and (low.device or 0) > limits.device:
        return "device", low.device or 0, limits.device
    if low.host > limits.host:
        return "host", low.host, limits.host
    if whole > limits.host + limits.disk:
        if limits.disk == 0:
            return "host", whole, limits.host
        return "disk", whole - limits.host, limits.disk
    return None


def said(low: Limits) -> str:
    """The smallest budgets in words."""
    sizes = (("device", low.device), ("host", low.host), ("disk", low.disk))
    return ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in sizes if nbytes)


def _leaving(trace: Trace) -> int:
    """Bytes of page-locked chunks that two blocks' activations go down to, one after the other."""
    groups = [sum(nbytes for _, nbytes in span.stored) for span in trace.spans if span.stored]
    return max((a + b for a, b in zip([0, *groups], groups, strict=False)), default=0)


def _is_backward(phase: str) -> bool:
    """Whether gradients may arrive after such an event."""
    return phase == "backward" or phase in WITHIN


def _whole(units: Sequence[Unit], trace: Trace, occupied: int, on_host: bool, accumulate: int) -> int:
    """Bytes that exist at once at the worst moment.

    While the first lap is measured, what was set aside for it stays so until the step: the last gradients come beside
    the highest peak. Later ones set aside what each moment needs, beside the sums of the micro-batches before.
    """
    saved = sum(nbytes for span in trace.spans for _, nbytes in span.stored)
    lasting = saved + sum(bytes_of(s.parameters + s.states) for unit in units for s in unit.stores)
    first = sum(
        bytes_of(s.totals if unit.index in trace.wide else s.gradients) for unit in units for s in unit.stores
    )
    sums = sum(bytes_of(s.totals) for unit in units for s in unit.stores) if accumulate > 1 else first
    if not on_host:
        return lasting + sums
    beside = trace.peak if accumulate > 2 else 0
    return lasting + occupied + max(first + trace.growth, sums + beside)


def _opened(unit: Unit, on_host: bool) -> int:
    """Bytes that a unit takes where the model computes while it is open."""
    return unit.nbytes if on_host else sum(store.run.nbytes for store in unit.stores)


def _gradient(unit: Unit, on_host: bool, again: bool, wide: bool) -> int:
    """The largest that must be held of a unit's gradients at once: a chunk on the host (with the fp32 sum that it is
    widened to), a run on a device."""
    trained = [store for store in unit.stores if store.run.trained]
    if on_host:
        return max((_on_host(store, again, wide) for store in trained), default=0)
    return max((buffer_bytes(store, wide) for store in trained), default=0)


def _on_host(store: RunStore, again: bool, wide: bool) -> int:
    narrow = max(chunk.nbytes for chunk in store.gradients)
    if store.totals is store.gradients:
        return narrow
    total = max(chunk.nbytes for chunk in store.totals)
    return total if wide else narrow + total if again else narrow


def buffer_bytes(store: RunStore, wide: bool) -> int:
    """Bytes of a run's gradient buffer on a device."""
    return store.run.numel * (max(4, store.run.dtype.itemsize) if wide else store.run.dtype.itemsize)
