"""Fifty saves keep nothing: neither memory nor descriptors nor threads."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import psutil
import pytest

import outcore
from checkpoint.runs import STACK, TIGHT, offloaded, train
from outcore.memory.heap import give_back

SAVES = 50
MIB = 1 << 20


def resident() -> int:
    give_back()  # what the C library's heap keeps is not a leak
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_fifty_saves(wait: bool, tmp_path: Path) -> None:
    with offloaded(STACK, **TIGHT.settings(tmp_path)) as (model, optimizer):

        def save(number: int) -> None:
            outcore.save(tmp_path / f"{number}", model, optimizer, wait=wait).wait()
            train(model, optimizer, STACK, range(number, number + 1))
            shutil.rmtree(tmp_path / f"{number}")

        for number in range(5):  # what is made once
            save(number)
        before, threads, descriptors = resident(), threading.active_count(), len(os.listdir("/proc/self/fd"))
        for number in range(5, 5 + SAVES):
            save(number)
        assert (resident() - before) / SAVES <= MIB
        assert threading.active_count() <= threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
