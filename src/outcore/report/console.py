"""A run on the terminal: its plan, its progress and what it came to."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from outcore.memory.sizes import format_size
from outcore.report.step import Step
from outcore.report.totals import Sums, Totals
from outcore.report.unfailing import Unfailing

LEAST = 0.005
"""Links that are waited for less than this share of a step are not named."""

_QUIET = 1.0
"""Least seconds between two lines where there is no terminal to show a bar on."""


def make_console(*, stderr: bool = False) -> Console:
    """A console as wide as its terminal; lines of a file are not wrapped. It never fails."""
    file: Any = Unfailing(sys.stderr if stderr else sys.stdout)
    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    return console


def show_plan(console: Console, plan: Mapping[str, str]) -> None:
    """What will be done, setting by setting."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in plan.items():
        grid.add_row(name, value)
    console.print(grid)


class _Bar(Progress):
    """A bar with what there is to say on lines of its own, which a narrow terminal folds."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.fields["said"], overflow="fold")


class Progressed:
    """Shows steps as they end: a bar on a terminal, else a line now and then (first and last always)."""

    def __init__(self, console: Console, steps: range) -> None:
        self._console = console
        self._first, self._steps = steps.start, steps.stop - 1
        self._last = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = _Bar(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(
                "", total=self._steps, completed=steps.start - 1, said="first step"
            )

    def __enter__(self) -> Progressed:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, step: Step) -> None:
        """A step is over."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step.number, said=said(step))
            return
        now = time.perf_counter()
        if step.number in (self._first, self._steps) or now - self._last >= _QUIET:
            self._last = now
            self._console.print(f"step {step.number}/{self._steps}  {said(step)}  {step.seconds:.2f} s")


def said(step: Step) -> str:
    """A step in one line."""
    tiers = (
        f"{tier} {format_size(step.after.held[tier])} of {format_size(budget)}"
        for tier, budget in step.after.budget.items()
    )
    skipped = (f"skipped {step.skipped}",) if step.skipped else ()
    speed = f"{step.tokens_per_second:,.0f} tokens/s"
    return "  ".join((f"loss {step.loss:.4f}", speed, waits(step), *tiers, *skipped))


def waits(step: Step) -> str:
    """The share of the step that waits, and on what: ``"waits 25% (disk read 18%, disk write 7%)"``."""
    shares = sorted(step.wait_shares.items(), key=lambda item: -item[1])
    named = ", ".join(f"{link} {share:.0%}" for link, share in shares if share >= LEAST)
    return f"waits {sum(share for _, share in shares):.0%}" + (f" ({named})" if named else "")


def show_end(console: Console, totals: Totals) -> None:
    """What the run came to: losses, tiers, links and where a step's time went."""
    first, last = totals.first, totals.last
    console.print()
    console.print(f"loss  first {first.loss:.4f}  last {last.loss:.4f}  change {last.loss - first.loss:+.4f}")
    console.print(_tiers(last))
    console.print(_links(totals))
    console.print(_times(totals.steady))


def _tiers(last: Step) -> Table:
    table = Table("tier", title="peak of each tier", title_justify="left")
    for name in ("peak", "budget", "share"):
        table.add_column(name, justify="right")
    for tier, budget in last.after.budget.items():
        peak = last.after.peak[tier]
        table.add_row(tier, format_size(peak), format_size(budget), f"{peak / budget:.1%}")
    return table


def _links(totals: Totals) -> Table:
    table = Table("link", title="bytes moved", title_justify="left")
    for name in ("in all", "per step"):
        table.add_column(name, justify="right")
    for link, nbytes in totals.moved.items():
        if nbytes or link.startswith("disk"):
            table.add_row(link, format_size(nbytes), format_size(nbytes // totals.count))
    return table


def _times(sums: Sums) -> Table:
    """Mean seconds of each part of a step."""
    which = f"steps {sums.first} to {sums.last}" if sums.count > 1 else f"step {sums.first}"
    table = Table("part", title=f"time of a step, mean of {which}", title_justify="left")
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    parts = {"compute": sums.compute}
    for link, seconds in sums.waited.items():
        if seconds or link.startswith("disk"):
            parts[f"waiting for {link}"] = seconds
    parts["update"] = sums.update
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds / sums.count:.3f}", f"{seconds / sums.seconds:.1%}")
    table.add_section()
    table.add_row("step", f"{sums.seconds / sums.count:.3f}", f"{sums.tokens / sums.seconds:,.0f} tokens/s")
    return table
