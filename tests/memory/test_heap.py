"""What the C library's heap keeps of what operators freed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# In a process of its own, where nothing else's memory comes and goes.
ALONE = """
import ctypes
import sys

from outcore.memory import heap

assert "torch" not in sys.modules
C = ctypes.CDLL(None)
C.malloc.restype = ctypes.c_void_p
MiB = 1 << 20


def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))


def used_and_freed(nbytes):
    block = C.malloc(ctypes.c_size_t(nbytes))
    ctypes.memset(block, 1, nbytes)
    C.free(ctypes.c_void_p(block))


heap.keep_little()
before = resident()
used_and_freed(96 * MiB)
print(resident() - before)
heap.Rule.of(1 << 30, True).apply()
used_and_freed(96 * MiB)
print(resident() - before)
heap.keep_little()
print(resident() - before)
"""

MiB = 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_the_heap_keeps_all_until_it_is_told_to_keep_little() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    at_first, keeping_all, at_last = map(int, done.stdout.split())
    assert at_first < 8 * MiB
    assert keeping_all > 88 * MiB
    assert at_last < 8 * MiB
