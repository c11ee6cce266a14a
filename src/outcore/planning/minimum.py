"""The least a run needs on each tier for its chunks, known from the layout alone.

Activations come on top; they are measured in the first lap (see `outcore.trace.gauge`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outcore.chunks.chunk import Chunk
from outcore.errors import BudgetError
from outcore.memory.sizes import format_size
from outcore.model.unit import Extra, Unit
from outcore.model.units import Point


@dataclass(frozen=True)
class Needs:
    """Bytes of chunks.

    Attributes:
        working: the most that must be on the host at one moment.
        total: everything that must be somewhere between two uses.
        largest: the name of the unit or chunk that asks for ``working``.
        update: the most that the update of one chunk holds, beside what is open all the time.
        device: the most that must be on an accelerator at one moment: the units of one call, and the
            gradients of a run. Nothing where the host computes.
    """

    working: int
    total: int
    largest: str
    update: int
    device: int


def needs(units: Sequence[Unit], points: Sequence[Point], sliced: bool, extra: Extra | None = None) -> Needs:
    """What a training step (or an inference, if nothing is trained) needs for chunks.

    Args:
        sliced: blocks sum their gradients over slices, in fp32.
        extra: what is needed beside chunks; nothing if not given.
    """
    extra = extra or Extra()
    around = [p for p in points if any(q is not p and _inside(q, p) for q in points)]
    base = {units[i] for p in around for i in p.units}
    working, largest, device = 0, "", 0
    for point in points:
        opened = {units[i] for i in point.units} | base
        whole = [s.run.entire for u in opened for s in u.stores]
        frames = sum(run.nbytes for run in whole)
        runs = [
            run.numel * (max(4, run.dtype.itemsize) if sliced and point.block else run.dtype.itemsize)
            for run in whole
            if run.trained
        ]
        device = max(device, frames + max(runs, default=0))
        nbytes = sum(u.nbytes + extra.frame(u) for u in opened) + extra.working
        nbytes += max((_gradient(u) for u in opened), default=0)
        if nbytes > working:
            working, largest = nbytes, point.name
    for unit in units:
        nbytes = _update(unit)
        if nbytes > working:
            working, largest = nbytes, f"the update of {unit.name}"
    update = sum(u.nbytes for u in base) + max(map(_update, units), default=0)
    total = extra.total + sum(
        bytes_of(store.parameters) + bytes_of(store.states) + bytes_of(store.gradients)
        for unit in units
        for store in unit.stores
    )
    return Needs(working, total, largest, update, device)


def check(found: Needs, host: int, disk: int, device: int | None) -> None:
    """Refuse budgets that can't hold the chunks.

    Args:
        host: bytes of the host budget.
        disk: bytes of all disks together, 0 if there is none.
        device: bytes of the device budget, ``None`` where the host computes.

    Raises:
        BudgetError: with the bytes that are needed and the smallest change that would do.
    """
    if device is not None and found.device > device:
        raise BudgetError(
            "device",
            found.device,
            device,
            f"the largest unit and its gradients must be there: give the device at least "
            f"{format_size(found.device)} and room for activations, or name smaller units",
        )
    if found.working > host:
        raise BudgetError(
            "host",
            found.working,
            host,
            f"{found.largest} must be there as a whole: give the host at least {format_size(found.working)} "
            "and room for activations, or name smaller units or a smaller chunk_size",
        )
    if found.total > host + disk:
        more = found.total - host - disk
        if disk == 0:
            raise BudgetError(
                "host",
                found.total,
                host,
                f"without a disk all states must be there: give the host {format_size(more)} more, or name a "
                f"disk with at least {format_size(more)} free",
            )
        raise BudgetError(
            "disk", found.total - host, disk, f"give the disk or the host {format_size(more)} more"
        )


def _gradient(unit: Unit) -> int:
    """A gradient chunk and the fp32 sum it is widened to are open together."""
    pairs = [
        bytes_of(dict.fromkeys(pair))
        for store in unit.stores
        for pair in zip(store.gradients, store.totals, strict=True)
    ]
    return max(pairs, default=0)


def _update(unit: Unit) -> int:
    return max(
        (
            bytes_of((store.parameters[k], store.totals[k], *store.states[k : k + 1]))
            for store in unit.stores
            if store.run.trained
            for k in range(store.run.chunks)
        ),
        default=0,
    )


def bytes_of(chunks: Iterable[Chunk]) -> int:
    """Bytes of these chunks together."""
    return sum(chunk.nbytes for chunk in chunks)


def _inside(inner: Point, outer: Point) -> bool:
    return any(module is inner.module for module in outer.module.modules() if module is not outer.module)
