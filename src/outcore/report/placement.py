"""Where a model's bytes came to lie once the order of uses is known, in words."""

from __future__ import annotations

from collections.abc import Mapping

from outcore.memory.ledger import TIERS, Snapshot
from outcore.memory.sizes import format_size

SETTLED = 3
"""The step or pass whose end is told of: the first is measured, the second finds no order with updates on record."""

CRUMB = 1000
"""A kind that has less than one part in so many of what its tier holds isn't named."""


def placement(now: Snapshot, moved: Mapping[str, int], turn: str) -> str:
    """What each tier in use holds by kind, and what one turn moves.

    Args:
        moved: bytes over each link in one turn.
        turn: what that is, such as a step.
    """
    parts = []
    for tier in TIERS:
        largest = sorted(now.kinds.get(tier, {}).items(), key=lambda kind: -kind[1])
        whole = sum(nbytes for _, nbytes in largest)
        kinds = [f"{kind} {format_size(nbytes)}" for kind, nbytes in largest if nbytes * CRUMB >= whole > 0]
        if kinds:
            parts.append(f"{tier} {', '.join(kinds)}")
    links = [f"{link} {format_size(nbytes)}" for link, nbytes in moved.items() if nbytes]
    return f"placement: {'; '.join(parts)}; a {turn} moves {', '.join(links) if links else 'nothing'}"


def since(before: Snapshot, now: Snapshot) -> dict[str, int]:
    """Bytes over each link between two snapshots."""
    return {link: nbytes - before.moved.get(link, 0) for link, nbytes in now.moved.items()}
