"""Ranks that run blocks in slices: the result of one process that does, whatever they shard and compute on."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel.devices import Lift, trained
from parallel.loops import Way
from parallel.test_parallel_matrix import STAGES, off, same
from parallel.together import Team, alone, values


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("accumulate", "kinds", "stages"),
    [
        (1, ("emu", "cpu"), ("parameters",)),
        pytest.param(2, ("cpu",), STAGES, marks=pytest.mark.slow),
        pytest.param(2, ("emu",), STAGES, marks=pytest.mark.slow),
    ],
    ids=["mixed", "cpu", "emulated"],
)
def test_blocks_in_slices(
    accumulate: int, kinds: tuple[str, ...], stages: tuple[str, ...], two: Team, tmp_path: Path
) -> None:
    """Three slices of two rows on each of two ranks, six in one process."""
    ways = [Way(stage, accumulate, steps=2, activations="recompute") for stage in stages]
    lifts = [Lift(way, kinds, microbatch=2) for way in ways]
    found = values(two.run(trained, tmp_path / "ranks", 120, lifts=lifts))
    [expected] = alone(trained, tmp_path / "alone", lifts=[Lift(ways[0], ("cpu",), microbatch=2)])
    for rank in found:
        for k, lift in enumerate(lifts):
            assert off(rank[k]["weights"], expected["weights"]) < 1e-6, lift
            assert rank[k]["norms"] == pytest.approx(expected["norms"], rel=1e-6)
            assert same(rank[k], found[0][k]), lift
