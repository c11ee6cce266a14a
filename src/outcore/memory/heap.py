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
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LEAST, _MAPPED, _SMALL = 1 << 20, 32 << 20, 64
"""Bytes from which on a result has a mapping of its own: a share of the host's budget, within these. The second is the
most that glibc comes to by itself."""

_MAPPINGS = 65536
"""The most results that have one: what glibc begins with."""

_MOST, _SHARE = 128 << 20, 16
"""Free bytes at the top that are kept: a share of the host's budget, up to so many, and some in any case."""


def keep_within(budget: int) -> None:
    """Let the heap keep what is freed within a lap, for a host budget of so many bytes. Holds for the process."""
    found = _library()
    if hasattr(found, "mallopt"):
        found.mallopt(_M_MMAP_THRESHOLD, max(_LEAST, min(_MAPPED, budget // _SMALL)))
        found.mallopt(_M_MMAP_MAX, _MAPPINGS)
        found.mallopt(_M_TRIM_THRESHOLD, max(2 * _LEAST, min(_MOST, budget // _SHARE)))


def keep_all() -> None:
    """Let the heap keep whatever is freed, until `keep_within` or `keep_little`. Holds for the process."""
    found = _library()
    if hasattr(found, "mallopt"):
        found.mallopt(_M_MMAP_MAX, 0)
        found.mallopt(_M_TRIM_THRESHOLD, -1)


def keep_little() -> None:
    """Let the heap keep what glibc would by itself, and return the rest to the system."""
    keep_within(0)
    give_back()


def give_back() -> None:
    """Return freed memory that the heap keeps to the system, where the C library can.

    After a backward pass glibc keeps what blocks below its mapping threshold left: 300 MB for GPT-2 124M with
    1,024 tokens, which the budget counts as free and chunks then take a second time.
    """
    found = _library()
    if hasattr(found, "malloc_trim"):
        found.malloc_trim(0)


@functools.cache
def _library() -> Any:
    """The C library; ``None`` where it can't be found."""
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None
