"""When what blocks offload is stored, read again and given back, in a simulated lap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outcore.planning.flow import Piece
from outcore.planning.recorder import Span


@dataclass
class SavedPieces:
    """By the number of a span: the pieces that are stored in it, that the backward beginning with it reads, and that
    are worth nothing after it.

    Attributes:
        here: those that the last block stored: a device has them still when its backward begins.
    """

    stored: dict[int, list[Piece]] = field(default_factory=dict)
    read: dict[int, list[Piece]] = field(default_factory=dict)
    dropped: dict[int, list[Piece]] = field(default_factory=dict)
    here: list[Piece] = field(default_factory=list)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SavedPieces:
        """The pieces of a traced step. A unit's backwards read what its forwards stored, the last first."""
        found = cls()
        calls: dict[int, list[list[Piece]]] = {}
        read: dict[int, list[Piece]] = {}
        for number, span in enumerate(spans):
            phase, unit = span.event
            groups: dict[int, list[Piece]] = {}
            for owner, nbytes in span.stored:
                groups.setdefault(owner, []).append(Piece(nbytes))
            for owner, made in groups.items():
                calls.setdefault(owner, []).append(made)
                found.here = made
                found.stored.setdefault(number, []).extend(made)
            if phase == "backward" and calls.get(unit):
                read[unit] = found.read[number] = calls[unit].pop()[::-1]
            elif phase == "closed" and unit in read:
                found.dropped[number] = read.pop(unit)
        return found
