"""What the C library's heap keeps of what operators freed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

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


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 64 << 20

RESULT = f"""
import resource

import outcore
import torch

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.zeros({SIZE}, dtype=torch.uint8).add_(1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(),
    reason="the system gives no huge pages to who asks for them",
)
@pytest.mark.parametrize(("said", "most"), [(None, 0.5), ("0", 2.0)])
def test_large_results_lie_in_huge_pages_unless_somebody_said_otherwise(
    said: str | None, most: float
) -> None:
    """Where the system has none left at the moment, some of them are small ones."""
    variables = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    variables |= {} if said is None else {"THP_MEM_ALLOC_ENABLE": said}
    done = subprocess.run(
        [sys.executable, "-c", RESULT], capture_output=True, text=True, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr
    small = SIZE >> 12
    assert int(done.stdout) < most * small
    if said == "0" and "[madvise]" in HUGE.read_text():
        assert int(done.stdout) >= small
