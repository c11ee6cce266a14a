"""The sections of the page below its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outcore.report.folder import Plan, Row
from outcore.report.page import curves
from outcore.report.page.gantt import gantt
from outcore.report.page.markup import Markup, join, tag
from outcore.report.page.scale import duration, percent, rate, share, size
from outcore.report.page.summary import lead, mean_parts, steady, which
from outcore.report.shares import by_unit, uses
from outcore.report.timeline import Record

OUTLIER = 3
"""A first step this many times as long as any other is left out where it would flatten the rest."""

LAST_ROWS = 20
"""Steps that the table of steps shows."""

UNITS = 15
"""The most units in the table of units."""


def course(rows: Sequence[Row]) -> Markup:
    loss = curves.curve(
        "Loss", [(row.step, row.loss) for row in rows], zero=False, words=lambda value: f"{value:.4f}"
    )
    speed = curves.curve(
        "Throughput, tokens per second",
        [(row.step, row.tokens_per_second) for row in rows],
        zero=True,
        words=lambda value: f"{value:,.0f} tokens/s",
    )
    return tag("section", tag("h2", "The run"), tag("div", loss, speed, class_="pair"))


def split(rows: Sequence[Row]) -> Markup:
    some = steady(rows)
    whole = sum(row.seconds for row in some) / len(some)
    parts = mean_parts(some)
    at, bars = 0.0, []
    total = sum(parts.values()) or 1.0
    for name, seconds in parts.items():
        bars.append(
            tag("rect", x=percent(at / total), width=percent(seconds / total), height="100%",
                class_=curves.colour(name), data_tip=f"{name}: {duration(seconds)}, {share(seconds, whole)}")
        )  # fmt: skip
        at += seconds
    listed = table(
        ("part", "seconds", "share"),
        [(name, f"{seconds:.3f}", share(seconds, whole)) for name, seconds in parts.items()]
        + [("step", f"{whole:.3f}", f"{sum(row.tokens for row in some) / len(some) / whole:,.0f} tokens/s")],
    )
    names = list(parts)
    shown = rows if rows[0].seconds <= OUTLIER * max(row.seconds for row in some) else some
    title = "Each step, seconds" if shown is rows else f"Each step, seconds ({which(rows)})"
    per_step = {name: [row.parts.get(name, 0.0) for row in shown] for name in names}
    return tag(
        "section",
        tag("h2", "Where a step's time goes"),
        tag("p", f"What the training thread does, mean of {which(rows)}. Waits are striped.", class_="note"),
        tag("div", tag("svg", bars, width="100%", height=34, role="img", aria_label=lead(rows)), class_="split"),
        tag("div", tag("div", curves.legend(names), listed),
            curves.columns(title, [row.step for row in shown], per_step) if names else None,
            class_="pair"),
    )  # fmt: skip


def links(rows: Sequence[Row], records: Sequence[Record]) -> Markup | None:
    some = steady(rows)
    links = [link for link in some[-1].moved if any(row.moved.get(link) for row in rows)]
    if not links:
        return None
    record = records[-1] if records else None
    used = uses(record) if record is not None else {}
    lines = []
    for link in links:
        moved = sum(row.moved.get(link, 0.0) for row in some) / len(some)
        waited = sum(row.waited.get(link, 0.0) for row in some) / len(some)
        seconds = sum(row.seconds for row in some) / len(some)
        line = [link, size(moved), rate(moved, seconds), duration(waited) if waited else "-"]
        if record is not None:
            use = used.get(link)
            line += ["-", "-"] if use is None else [
                share(min(use.seconds, record.seconds), record.seconds), rate(use.nbytes, use.taken)
            ]  # fmt: skip
        lines.append(line)
    head = ["link", "bytes a step", "over the whole step", "waited for"]
    if record is not None:
        head += [f"busy (step {record.number})", "rate while busy"]
    return tag("section", tag("h2", "Bytes per link"), tag("div", table(head, lines), class_="scroller"))


# -- recorded steps -----------------------------------------------------------------------------------


def recorded_steps(records: Sequence[Record]) -> Markup:
    return tag(
        "section",
        tag("h2", "A step, recorded"),
        tag("p", "What ran when, who waited, and what each tier held; the dashed line is the budget. Point at anything "
            "for its name and numbers; + and - or Ctrl and the wheel zoom. trace.json shows the same in Perfetto.",
            class_="note"),
        tag("div", [recorded(record) for record in records], class_="steps"),
    )  # fmt: skip


def recorded(record: Record) -> Markup:
    notes = []
    if record.dropped:
        notes.append(f"{record.dropped:,} events beyond the limit were not kept.")
    if not record.exact:
        notes.append(
            "The device's events tell no time: its copies and kernels are shown when they were submitted."
        )
    units = by_unit(record)
    listed = table(
        ("unit", "forward", "backward"),
        [
            (name, *(duration(parts[t]) if t in parts else "-" for t in ("forward", "backward")))
            for name, parts in units[:UNITS]
        ],
    )
    more = f" ({UNITS} of {len(units)})" if len(units) > UNITS else ""
    return tag(
        "div",
        tag("h3", f"Step {record.number}, {duration(record.seconds)}"),
        gantt(record),
        [tag("p", note, class_="note") for note in notes],
        tag("details", tag("summary", f"The units that take longest{more}"), listed) if units else None,
        class_="recorded", data_title=f"step {record.number}",
    )  # fmt: skip


# -- tables -------------------------------------------------------------------------------------------


def plan(plan: Plan, rows: Sequence[Row]) -> Markup:
    lines = []
    for tier, nbytes in plan.peak_bytes.items():
        measured = rows[-1].peak.get(tier) if rows else None
        lines.append(
            (
                f"peak of {tier}",
                size(nbytes),
                "-" if measured is None else size(measured),
                _off(nbytes, measured),
            )
        )
    if plan.step_seconds is not None:
        some = steady(rows)
        seconds = sum(row.seconds for row in some) / len(some) if some else None
        lines.append(("step", duration(plan.step_seconds), "-" if seconds is None else duration(seconds),
                      _off(plan.step_seconds, seconds)))  # fmt: skip
    limit = tag("p", f"Expected to be limited by {plan.bottleneck}.") if plan.bottleneck else None
    return tag(
        "section",
        tag("h2", "Plan against measured"),
        limit,
        table(("", "planned", "measured", "off by"), lines) if lines else tag("p", "The plan names no number."),
    )  # fmt: skip


def _off(planned: float, measured: float | None) -> str:
    return f"{100 * (measured - planned) / planned:+.1f} %" if planned and measured is not None else "-"


def settings(settings: Mapping[str, str]) -> Markup:
    lines = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in settings.items()]
    return tag("section", tag("h2", "Settings"), tag("table", tag("tbody", lines), class_="settings"))


def steps(rows: Sequence[Row]) -> Markup:
    shown = rows[-LAST_ROWS:]
    head = ("step", "loss", "learning rate", "gradient norm", "seconds", "tokens/s", "waiting")
    lines = [
        (
            f"{row.step:,}",
            _number(row.loss, ".4f"),
            _number(row.lr, ".3g"),
            _number(row.grad_norm, ".4g"),
            f"{row.seconds:.3f}",
            f"{row.tokens_per_second:,.0f}",
            share(sum(row.waited.values()), row.seconds),
        )
        for row in shown
    ]
    said = f"The last {len(shown)} of {len(rows):,} steps" if len(rows) > len(shown) else "All steps"
    return tag("details", tag("summary", said), tag("div", table(head, lines), class_="scroller"))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Markup:
    rows = [
        tag("tr", [tag("th" if k == 0 else "td", cell, scope="row" if k == 0 else None) for k, cell in enumerate(line)])
        for line in lines
    ]  # fmt: skip
    return tag(
        "table",
        tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
        tag("tbody", join(rows)),
    )
