"""The least that any policy could move for an order of uses, as the optimum of a linear program.

A chunk is used, then not, then used again. Between two uses a share of it stays on the host, from none to all. What
does not stay is read for the next use, if that needs it; and written once, if it changed since it was last written. At
every moment what is in use and what stays must fit. The least of read and written bytes over all shares is below what
any policy moves that sees this order and keeps chunks whole, so it is a lower bound (Belady's rule is optimal for
reads of equal chunks alone; with writes and sizes there is no such rule).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sides.uses import Order, Use

Bytes = dict[tuple[str, str], float]
"""By link and kind of chunk."""


def least(order: Order) -> Bytes | None:
    """Bytes that must move for the order, which repeats itself; ``None`` where scipy is not installed.

    Raises:
        ValueError: what is in use at once does not fit.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix
    except ImportError:
        return None
    program = Program(order)
    found = linprog(
        program.cost,
        A_ub=csr_matrix((program.values, (program.rows, program.columns)), shape=program.shape),
        b_ub=program.bounds,
        bounds=(0, 1),
        method="highs",
    )
    if not found.success:
        raise ValueError(f"there is no such run: {found.message}")
    return program.bytes_of(found.x)


class Program:
    """Variables are the shares that leave in each gap, and the shares that are written. Sizes are in units of MiB."""

    def __init__(self, order: Order) -> None:
        self.cost: list[float] = []
        self.bounds: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self._meaning: list[tuple[str, str, float] | None] = []
        self._gaps: list[tuple[Use, Use, int]] = []
        by_chunk: defaultdict[Any, list[Use]] = defaultdict(list)
        for use in order.uses:
            by_chunk[use.chunk].append(use)
        for uses in by_chunk.values():
            self._add_chunk(uses)
        self._add_room(order)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.bounds), len(self.cost)

    def bytes_of(self, shares: Any) -> Bytes:
        found: Bytes = defaultdict(float)
        for meaning, share in zip(self._meaning, shares, strict=True):
            if meaning is not None:
                link, kind, nbytes = meaning
                found[link, kind] += nbytes * share
        return dict(found)

    def _add_chunk(self, uses: list[Use]) -> None:
        """Its gaps, in a circle, and what must be written in them."""
        chunk = uses[0].chunk
        changed = max((k for k, use in enumerate(uses) if use.writes), default=None)
        written = None
        order = range(len(uses)) if changed is None else range(changed, changed + len(uses))
        for k in (k % len(uses) for k in order):
            use, then = uses[k], uses[(k + 1) % len(uses)]
            if use.writes:
                written = None
            if use.last or not then.reads:
                continue
            leaves = self._variable("disk read", chunk)
            self._gaps.append((use, then, leaves))
            if changed is not None:
                if written is None:
                    written = self._variable("disk write", chunk)
                self._bound({leaves: 1.0, written: -1.0}, 0.0)

    def _variable(self, link: str, chunk: Any) -> int:
        self.cost.append(chunk.nbytes / 2**20)
        self._meaning.append((link, chunk.kind.value, chunk.nbytes))
        return len(self.cost) - 1

    def _bound(self, row: dict[int, float], most: float) -> None:
        for column, value in row.items():
            self.rows.append(len(self.bounds))
            self.columns.append(column)
            self.values.append(value)
        self.bounds.append(most)

    def _add_room(self, order: Order) -> None:
        """At every moment what is in use, and of the others what stays, fits."""
        moments = len(order.room)
        used = [0.0] * (moments + 1)
        staying: list[dict[int, float]] = [{} for _ in range(moments)]
        for use in order.uses:
            for at in range(use.start, max(use.stop, use.start + 1)):
                used[at] += use.chunk.nbytes
        for use, then, leaves in self._gaps:
            around = range(use.stop, then.start if then.start >= use.stop else then.start + moments)
            for at in around:
                staying[at % moments][leaves] = use.chunk.nbytes
        seen: dict[frozenset[int], int] = {}
        for at in range(moments):
            room = order.room[at] - used[at] - sum(staying[at].values())
            key = frozenset(staying[at])
            if room >= 0 or seen.get(key, 1) <= room:  # everything fits, or a tighter moment was there before
                continue
            seen[key] = room
            self._bound({gap: -size / 2**20 for gap, size in staying[at].items()}, room / 2**20)
