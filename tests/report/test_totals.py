"""What a run came to, and a stream that breaks meanwhile."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from test_progress import step

from outcore.report.console import make_console, show_end
from outcore.report.step import Step
from outcore.report.totals import Totals
from outcore.report.unfailing import Unfailing


def steps(count: int) -> list[Step]:
    return [
        replace(step(disk_read=float(k)), number=k, loss=1 / k, tokens=100 * k) for k in range(1, count + 1)
    ]


def test_totals_are_those_of_all_steps_and_times_of_all_but_the_first() -> None:
    found = steps(5)
    totals = Totals(found[0])
    assert (totals.steady.count, totals.steady.first, totals.steady.last) == (1, 1, 1)
    for one in found[1:]:
        totals.add(one)
    assert totals.count == 5
    assert (totals.first, totals.last) == (found[0], found[-1])
    assert totals.moved == {link: sum(one.moved[link] for one in found) for link in found[0].moved}
    steady = totals.steady
    assert (steady.count, steady.first, steady.last, steady.tokens) == (4, 2, 5, 1400)
    for name in ("seconds", "compute", "update"):
        assert getattr(steady, name) == pytest.approx(sum(getattr(one, name) for one in found[1:]))
    assert steady.waited["disk read"] == pytest.approx(2 + 3 + 4 + 5)


def test_a_run_keeps_no_more_of_a_million_steps_than_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has two snapshots of the ledger."""
    first, second = steps(2)
    totals = Totals(first)
    for _ in range(1000):
        totals.add(second)
    held = [value for name, value in vars(totals).items() if isinstance(value, (list, tuple, set))]
    assert held == []
    assert all(len(value) <= 4 for value in (totals.moved, totals.steady.waited))


class Broken(io.StringIO):
    """Takes so many writes."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self._left = whole

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_what_a_broken_stream_is_told_is_lost_and_nothing_else() -> None:
    stream = Broken(1)
    unfailing = Unfailing(stream)
    assert unfailing.write("one") == 3
    assert unfailing.write("two, and more") == 13
    unfailing.flush()
    assert stream.getvalue() == "one"
    assert unfailing.isatty() is False


def test_a_console_without_a_reader_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(0))
    console = make_console()
    totals = Totals(steps(1)[0])
    show_end(console, totals)


def test_python_itself_ends_well_after_its_stream_broke() -> None:
    code = """
import os, sys
from outcore.report.unfailing import Unfailing
read, write = os.pipe()
os.dup2(write, 1)
os.close(read), os.close(write)
out = Unfailing(sys.stdout)
out.write("lost")
out.flush()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert (done.returncode, done.stderr) == (0, "")
