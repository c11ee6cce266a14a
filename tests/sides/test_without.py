"""What the ablation turns off changes no bit of a run; the pictures of a scaling report are drawings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outcore import engine
from outcore.chunks.core import Core
from outcore.chunks.holdings import Holdings
from outcore.chunks.room import Room
from outcore.memory.disk import DiskTier
from outcore.model import sites
from outcore.optim.kernels import AdamRule, choice

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that ideas are turned off by is as it was afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for owner, name in (
        (engine, "Pipeline"), (engine, "workers"), (Room, "write_behind"), (sites, "Belady"),
        (sites, "Residents"), (Core, "pump"), (Holdings, "empty"),
        (AdamRule, "can_split"), (choice, "_compiled"), (DiskTier, "__init__"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(choice, "_chosen", {})


def turn(folder: Path) -> dict[str, Any]:
    from sides.turn import train

    return train(
        dict(
            contender="outcore, disk", model="gpt2-tiny", rows=2, tokens=32, device="cpu", disk=str(folder),
            budget={"host": "6MiB"}, warm=2, steps=1,
        )
    )  # fmt: skip


def test_no_idea_changes_a_bit(tmp_path: Path) -> None:
    """One after the other is turned off, until none is left."""
    from sides.without import WITHOUT, do_without

    whole = turn(tmp_path)
    for name in WITHOUT:
        do_without(name)
        assert turn(tmp_path)["loss"] == whole["loss"], name


def test_a_plot_has_a_mark_for_each_point(tmp_path: Path) -> None:
    from sides import plot

    lines = {"a < b": [(7.0, 3.0), (17.0, 9.0), (34.0, 30.0)], "c": [(7.0, 0.05), (34.0, 60.0)]}
    plot.write_plot(tmp_path / "plot.svg", "T & t", "x", "y", lines)
    drawn = (tmp_path / "plot.svg").read_text("utf-8")
    marks = re.findall(r'<circle cx="([0-9.]+)" cy="([0-9.]+)"', drawn)
    assert len(marks) == 5
    assert all(0 < float(x) < plot.WIDTH and 0 < float(y) < plot.HEIGHT for x, y in marks)
    assert "a &lt; b" in drawn
    assert "T &amp; t" in drawn


def test_bars_are_as_long_as_their_numbers(tmp_path: Path) -> None:
    from sides import bars

    numbers = {"a & b": {"seconds": 2.0, "bytes": 1.0}, "c": {"seconds": 0.5}}
    bars.write_bars(tmp_path / "bars.svg", "T", numbers)
    drawn = (tmp_path / "bars.svg").read_text("utf-8")
    long = [float(width) for width in re.findall(r'width="([0-9.]+)" height="9"', drawn)]
    assert [width / max(long) for width in long] == pytest.approx([1.0, 0.5, 0.25], abs=1e-2)
    assert "a &amp; b" in drawn


def test_readings_of_several_runs_go_together(tmp_path: Path) -> None:
    from ablation import BASE, bars_of, pooled

    moved = {"disk read": 2e6, "disk write": 1e6}
    for name, seconds in (("first", 1.0), ("second", 3.0)):
        turns = {
            key: {"turns": [{"seconds": [seconds * times], "moved": moved}], "failure": None}
            for key, times in ((BASE, 1.0), ("x", 1.5))
        }
        (tmp_path / name).write_text(json.dumps({"training": turns}), "utf-8")
    scores = pooled([tmp_path / "first", tmp_path / "second"], "training")
    assert scores[BASE].readings("seconds") == [1.0, 3.0]
    assert bars_of(scores) == {"x": {"seconds": 1.5, "bytes": 1.0}}
