"""A part of the sweep of `benchmarks/fault_sweep.py`, which takes all operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeping.cases import NAMES, sweep

STRIDES = {"begin": 89, "train": 61, "save": 67, "save beside": 89, "load": 67}
"""Primes, so that the cases fall on operations of each kind."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_sweep(name: str, tmp_path: Path) -> None:
    tally = sweep(tmp_path, name, STRIDES[name])
    assert tally.faults == []
    assert tally.cases > 10
    assert len(tally.outcomes) > 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_larger_part_of_the_sweep(name: str, tmp_path: Path) -> None:
    tally = sweep(tmp_path, name, 7, 3)
    assert tally.faults == []
