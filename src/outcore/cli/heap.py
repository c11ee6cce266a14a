"""Memory that the C library keeps for itself after it was freed."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give freed memory back to the system, where the C library can (glibc)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
