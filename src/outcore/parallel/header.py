"""What each rank says of itself before something is done together: a few bytes of fixed size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outcore.errors import PeerError

DOING, STORY, BITS = 96, 240, 64
SIZE = 8 + 8 + DOING + STORY + BITS
"""Bytes of a header. `BITS` of them are for the caller."""


@dataclass(frozen=True)
class Header:
    """One rank's word.

    Attributes:
        sequence: how many words it gave before.
        doing: what it is about to do.
        fault: what went wrong with it; empty if nothing did.
        bits: the caller's.
    """

    sequence: int
    doing: str
    fault: str
    bits: bytes

    def pack(self) -> bytes:
        doing, story = _cut(self.doing, DOING), _cut(self.fault, STORY)
        lengths = b"".join(len(part).to_bytes(2, "little") for part in (doing, story, self.bits))
        return b"".join(
            (
                self.sequence.to_bytes(8, "little"),
                lengths.ljust(8, b"\0"),
                doing.ljust(DOING, b"\0"),
                story.ljust(STORY, b"\0"),
                self.bits.ljust(BITS, b"\0"),
            )
        )

    @staticmethod
    def unpack(data: bytes) -> Header:
        doing, story, bits = (int.from_bytes(data[at : at + 2], "little") for at in (8, 10, 12))
        rest = data[16:]
        return Header(
            int.from_bytes(data[:8], "little"),
            rest[:doing].decode("utf-8", "replace"),
            rest[DOING : DOING + story].decode("utf-8", "replace"),
            rest[DOING + STORY : DOING + STORY + bits],
        )


def compare(headers: Sequence[Header], own: int) -> PeerError | None:
    """What keeps ranks that said this from going on together, as rank ``own`` is told of it."""
    for rank, header in enumerate(headers):
        if header.fault:
            here = "" if rank == own else f" (rank {own} was at {headers[own].doing})"
            return PeerError(
                rank, header.doing, f"rank {rank} failed in {header.doing}: {header.fault}{here}"
            )
    said = [(header.sequence, header.doing) for header in headers]
    common, _ = Counter(said).most_common(1)[0]
    for rank, words in enumerate(said):
        if words != common:
            other = said.index(common)
            return PeerError(
                rank,
                words[1],
                f"rank {rank} asks for {words[1]} where rank {other} asks for {common[1]}: all ranks must call the "
                "model, its units and the optimizer in the same order, equally often",
            )
    return None


def _cut(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]
