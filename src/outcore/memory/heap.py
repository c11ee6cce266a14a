"""The C library's heap, where operators' results live.

[Note: Trimming]
glibc gives the top of its heap back whenever twice its mapping threshold lies free there, and takes it again for the
next operator: on a small budget every page of the activations was found and cleared several times in a step (260,000
faults of GPT-2 124M with 1,024 tokens, 150,000 without that: a tenth of the step). So it may keep a part of the host's
budget, until the lap's end gives everything back.

What is freed below the top stays in any case. So on a small budget also results of a MiB or two have mappings of their
own: gradients of 2.4 MiB that came and went in the heap left 57 MB of holes in it, of a budget of 117 (which of its
operators use the heap depends on the processor).

Where all chunks take a small part of the budget nothing needs the room, and the heap keeps all that it ever had,
also the large results that otherwise have mappings of their own.

[Note: Huge results]
What the heap may not keep is found again, and on small pages that is 145,000 faults in a step of GPT-2 124M with 1,024
tokens and a host budget of 768 MiB: half a processor second of the system's, and most of another in which other cores
wait for the one that faults. torch's allocator asks for huge pages where ``THP_MEM_ALLOC_ENABLE`` says so, for results
of 2 MiB and more: the step took 4.3 s in place of 5.0, with 1.44 GB in place of 1.63. It reads the variable when it
first allocates, so ``import outcore`` sets it, unless somebody has.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LEAST, _MAPPED, _SMALL = 1 << 20, 32 << 20, 64
"""Bytes from which on a result has a mapping of its own: a share of the host's budget, within these. The second is the
most that glibc comes to by itself."""

_MAPPINGS = 65536
"""The most results that have one: what glibc begins with."""

_MOST, _SHARE = 128 << 20, 16
"""Free bytes at the top that are kept: a share of the host's budget, up to so many, and some in any case."""


@dataclass(frozen=True)
class Rule:
    """What the heap keeps.

    Attributes:
        mapped: bytes from which on a result has a mapping of its own; 0: none has.
        kept: free bytes at its top that stay; below 0: all.
    """

    mapped: int
    kept: int

    @classmethod
    def of(cls, budget: int, roomy: bool) -> Rule:
        """That of a run.

        Args:
            budget: bytes of the host.
            roomy: whether all chunks take a small part of it.
        """
        if roomy:
            return cls(0, -1)
        mapped = max(_LEAST, min(_MAPPED, budget // _SMALL))
        return cls(mapped, max(2 * _LEAST, min(_MOST, budget // _SHARE)))

    def apply(self) -> None:
        """From now on. Holds for the process."""
        found = _library()
        if hasattr(found, "mallopt"):
            if self.mapped:
                found.mallopt(_M_MMAP_THRESHOLD, self.mapped)
            found.mallopt(_M_MMAP_MAX, _MAPPINGS if self.mapped else 0)
            found.mallopt(_M_TRIM_THRESHOLD, self.kept)


USUAL = Rule(_MAPPED, 2 * _MAPPED)
"""What glibc comes to by itself."""


def keep_little() -> None:
    """Let the heap keep what glibc would by itself, and return the rest to the system."""
    USUAL.apply()
    give_back()


def give_back(kept: int = 0) -> None:
    """Return freed memory that the heap keeps to the system, where the C library can; ``kept`` bytes stay at its top.

    After a backward pass glibc keeps what blocks below its mapping threshold left: 300 MB for GPT-2 124M with
    1,024 tokens, which the budget counts as free and chunks then take a second time.
    """
    found = _library()
    if hasattr(found, "malloc_trim"):
        found.malloc_trim(kept)


@functools.cache
def _library() -> Any:
    """The C library; ``None`` where it can't be found."""
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None
