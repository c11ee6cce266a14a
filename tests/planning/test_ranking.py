"""The fastest of what fits, also where a timing was disturbed."""

from __future__ import annotations

from typing import Any

import pytest

import outcore
from outcore.planning.outcome import Outcome
from outcore.planning.ranking import Fit, fastest, seconds
from outcore.planning.settings import Settings

MIB = 1 << 20


def fit(
    blocks: Any, compute: float, waits: float = 0.0, micro: int = 8, chunk: int = 8, flops: int = 0
) -> Fit:
    settings = Settings(micro, 8 // micro, outcore.Activations(blocks), chunk * MIB)
    outcome = Outcome(compute + waits, compute, 0.0, {}, {}, {}, {}, {})
    return Fit(settings, outcome, flops or (300 if blocks == "keep" else 400))


def test_the_shortest_step_is_the_fastest_and_of_equals_the_larger_micro_batch() -> None:
    slow, small, large = fit("keep", 3.0), fit("recompute", 2.0, micro=2), fit("recompute", 2.0, micro=4)
    assert fastest([slow, small, large]) is large


def test_more_passes_must_be_faster_by_more_than_a_plan_is_off() -> None:
    one, two = fit("recompute", 0.6, waits=0.119), fit("recompute", 0.6, waits=0.099, micro=4)
    assert fastest([one, two]) is one
    assert fastest([one, fit("recompute", 0.6, waits=0.090, micro=4)]) is not one
    wide = fit("recompute", 0.6, waits=0.118, chunk=32)
    assert fastest([one, wide, two]) is wide


def test_more_passes_never_compute_less() -> None:
    one, two = fit("recompute", 0.8, waits=0.078), fit("recompute", 0.6, waits=0.102, micro=4)
    assert seconds(two, [one, two]) == pytest.approx(0.8 + 0.102)
    assert seconds(one, [one, two]) == one.outcome.seconds
    assert fastest([one, two]) is one
    other = fit("keep", 0.9)  # computes something else
    assert seconds(two, [other, two]) == two.outcome.seconds


def test_what_is_kept_is_not_slower_to_compute_than_what_is_recomputed() -> None:
    kept, again = fit("keep", 0.203), fit("recompute", 0.152)
    assert seconds(kept, [kept, again]) == pytest.approx(0.152 * 3 / 4)
    assert seconds(again, [kept, again]) == 0.152
    assert fastest([kept, again]) is kept


def test_chunks_have_no_part_in_it() -> None:
    kept, wide, again = fit("keep", 0.203), fit("keep", 0.203, chunk=32), fit("recompute", 0.152)
    assert seconds(wide, [kept, again]) == seconds(kept, [kept, again])


def test_what_kept_blocks_wait_for_still_counts() -> None:
    kept, again = fit("keep", 0.203, waits=0.1), fit("recompute", 0.152)
    assert fastest([kept, again]) is again


def test_other_passes_say_nothing() -> None:
    kept, again = fit("keep", 0.203), fit("recompute", 0.152, micro=4)
    assert seconds(kept, [kept, again]) == kept.outcome.seconds
    assert fastest([kept, again]) is again
