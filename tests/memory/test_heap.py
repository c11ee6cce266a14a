"""What the C library's heap keeps of what operators freed."""

from __future__ import annotations

import ctypes

import pytest
import torch

from outcore.memory import heap
from outcore.memory.host import PAGE

MiB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def used_and_freed(nbytes: int) -> None:
    torch.ones(nbytes, dtype=torch.uint8)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_the_heap_keeps_all_until_it_is_told_to_keep_little() -> None:
    try:
        heap.keep_little()
        before = resident()
        used_and_freed(96 * MiB)
        assert resident() - before < 72 * MiB
        heap.keep_all()
        used_and_freed(96 * MiB)
        assert resident() - before > 88 * MiB
        heap.keep_little()
        assert resident() - before < 8 * MiB
    finally:
        heap.keep_little()
