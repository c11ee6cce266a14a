"""A recorded step as a picture: a row per resource, and below it what each tier held, over one axis of time.

Everything is placed in percent of the step, so that the script zooms by widening the picture, and without the script
it still shows the whole step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from outcore.memory.observer import TRACKS
from outcore.report.chrome import rows, thread_of
from outcore.report.page.curves import colour, legend
from outcore.report.page.markup import Markup, tag
from outcore.report.page.scale import duration, percent, plain, rate, share, size, ticks
from outcore.report.placement import CRUMB
from outcore.report.shares import Filling, fillings, outside, uses
from outcore.report.timeline import Record, Span

FINE = 1 / 3000
"""Spans shorter than this share of the step, and as close together, are drawn as one."""

ROWS = 6
"""The most rows of one resource; what does not fit lies on the last."""

STATES = 1200
"""The most states of a tier that are drawn."""

FAR = 3
"""A budget this many times the peak is not drawn: the picture shows what is held instead."""

LABELLED = 0.004
"""Share of the step from which on a span carries its name; the script hides those that don't fit."""

AXIS, PAD, TALL, FLAT, TIER = 24, 5, 22, 9, 110
"""Heights in pixels: of the axis of time, between rows, of rows of compute, of other rows, of a tier."""

_TALL = frozenset({"compute", "update"})


@dataclass(frozen=True)
class Lane:
    """A row of the picture: what stands beside it, and what is drawn in it."""

    title: str
    facts: tuple[str, ...]
    height: int
    drawn: Sequence[Markup]


def gantt(record: Record) -> Markup:
    """The picture of one step."""
    tiers = fillings(record, STATES)
    lanes = [*_resources(record), *(_tier(filling, record) for filling in tiers)]
    at = AXIS
    backs, drawn, labels = [], [], []
    for lane in lanes:
        backs.append(tag("rect", x=0, width="100%", y=at, height=lane.height, class_="lane"))
        drawn.append(tag("svg", lane.drawn, x=0, width="100%", y=at, height=lane.height, overflow="hidden"))
        facts = [tag("small", fact) for fact in lane.facts]
        labels.append(tag("div", tag("b", lane.title), facts, style=f"top:{at}px;height:{lane.height}px"))
        at += lane.height + PAD
    seconds = record.seconds
    marks = ticks(0, seconds, 8)
    said, unit = (plain(marks), "s") if seconds >= 1 else (plain([1e3 * m for m in marks]), "ms")
    axis = [
        (
            tag("line", x1=percent(m / seconds), x2=percent(m / seconds), y1=AXIS - 5, y2=at, class_="grid"),
            tag(
                "text",
                f"{said(m if unit == 's' else 1e3 * m)} {unit}",
                x=percent(m / seconds),
                y=AXIS - 9,
                class_="tick",
            ),
        )
        for m in marks
        if m < 0.97 * seconds
    ]
    picture = tag(
        "svg", backs, tag("g", axis, class_="time"), drawn,
        tag("line", x1=0, x2=0, y1=AXIS - 5, y2=at, class_="cross"),
        width="100%", height=at, role="img", aria_label=f"What happened when in step {record.number}",
    )  # fmt: skip
    kinds = dict.fromkeys(
        kind for filling in tiers for k, kind in enumerate(filling.kinds) if _is_seen(filling, k)
    )
    held = [
        {
            "tier": filling.tier,
            "kinds": filling.kinds,
            "states": [[round(state.at / seconds, 6), *state.kinds] for state in filling.states],
        }
        for filling in tiers
    ]
    return tag(
        "div",
        tag("div", legend(_tracks(record)),
            tag("div", _tools(), class_="tools", hidden=True), class_="bar"),
        tag("div", tag("div", labels, class_="labels", style=f"height:{at}px"),
            tag("div", tag("div", picture, class_="inner"), class_="scroll", tabindex="0",
                aria_label="Timeline: plus and minus zoom, arrow keys move"), class_="lanes"),
        tag("div", legend(tuple(kinds)), class_="bar") if tiers else None,
        class_="timeline", data_seconds=seconds, data_held=json.dumps(held),
    )  # fmt: skip


def _is_seen(filling: Filling, kind: int) -> bool:
    """Whether a kind is ever more than a crumb of what its tier holds."""
    return any(state.kinds[kind] * CRUMB >= state.total > 0 for state in filling.states)


def _tracks(record: Record) -> list[str]:
    """What the legend names: links have rows with names of their own."""
    there = {_look(span) for span in record.spans}
    named = [track for track in ("forward", "backward", "update") if track in there]
    elsewhere = [] if "device" in record.budget else ["outside units"]
    return named + elsewhere + sorted(look for look in there if look.startswith("waiting for"))


def _look(span: Span) -> str:
    """What names the colour of a span: a wait has that of the link that is waited for."""
    return f"waiting for {span.name}" if span.track.endswith("waiting") else span.track


def _tools() -> list[Markup]:
    return [
        tag("button", text, type="button", data_zoom=zoom, aria_label=label)
        for text, zoom, label in (("-", "0.5", "Zoom out"), ("+", "2", "Zoom in"), ("whole step", "0", "Whole step"))
    ]  # fmt: skip


# -- rows of resources --------------------------------------------------------------------------------


def _resources(record: Record) -> list[Lane]:
    used = uses(record)
    lanes = []
    for thread in dict.fromkeys(thread_of(track) for track in TRACKS if track != "step"):
        spans = [
            s
            for s in record.spans
            if thread_of(s.track) == thread and s.stop > record.start and s.start < record.stop
        ]
        if not spans:
            continue
        shown = [use for track, use in used.items() if thread_of(track) == thread]
        seconds, nbytes = sum(use.seconds for use in shown), sum(use.nbytes for use in shown)
        taken = sum(use.taken for use in shown)
        facts = [f"busy {share(min(seconds, record.seconds), record.seconds)}"]
        if nbytes:
            facts.append(f"{size(nbytes)}, {rate(nbytes, taken)}")
        tall = thread in _TALL
        height = TALL if tall else FLAT
        if thread == "compute" and "device" not in record.budget:
            spans += outside(record)
        found = rows(spans)
        if len(found) > ROWS:
            found = [*found[: ROWS - 1], list(chain.from_iterable(found[ROWS - 1 :]))]
        drawn = [
            _bar(members, record, k * height, height - (2 if tall else 1), tall)
            for k, row in enumerate(found)
            for members in _fused(row, record.seconds * FINE)
        ]
        title, _, inside = thread.partition(" (")
        if inside:
            facts.insert(0, inside.rstrip(")"))
        lanes.append(Lane(title, tuple(facts), max(len(found) * height, 14 + 14 * len(facts)), drawn))
    return lanes


def _fused(row: Iterable[Span], fine: float) -> list[list[Span]]:
    """Neighbours too short and too close to tell apart, together."""
    found: list[list[Span]] = []
    for span in row:
        last = found[-1] if found else None
        if (
            last is not None
            and span.seconds < fine
            and span.start - last[-1].stop < fine
            and span.stop - last[0].start < 4 * fine
            and _look(last[0]) == _look(span)
        ):
            last.append(span)
        else:
            found.append([span])
    return found


def _bar(members: list[Span], record: Record, y: int, height: int, named: bool) -> Markup:
    first = members[0]
    start, stop = max(first.start, record.start), min(max(s.stop for s in members), record.stop)
    x, width = (start - record.start) / record.seconds, max(0.0, stop - start) / record.seconds
    told, look = _told(members, record), f"span {colour(_look(first))}"
    if not named or first.track == "outside" or width < LABELLED or len(members) > 1:
        return tag("rect", x=percent(x), width=percent(width), y=y, height=height, class_=look, data_tip=told)
    return tag(
        "svg",
        tag("rect", width="100%", height="100%", rx=2, class_=look),
        tag("text", _short(first.name), x=4, y=height / 2, class_=f"name on-{colour(first.track)}"),
        x=percent(x), width=percent(width), y=y, height=height, data_tip=told,
        class_="named" if width >= 0.05 else "named small",
    )  # fmt: skip


def _told(members: list[Span], record: Record) -> str:
    """What is said of a bar when it is pointed at."""
    first, nbytes = members[0], sum(span.nbytes for span in members)
    seconds = sum(span.seconds for span in members)
    after = "" if members[-1].stop <= record.stop else ", ends after the step"
    if first.track.endswith("waiting"):
        who = "compute stream: " if first.track == "device waiting" else ""
        title = who + _look(first) + (f", {len(members)} times" if len(members) > 1 else "")
    else:
        title = f"{first.track} {first.name}" + (f" and {len(members) - 1} more" if len(members) > 1 else "")
    moved = f"\n{size(nbytes)}, {rate(nbytes, seconds)}" if nbytes else ""
    return (
        f"{title}\n{duration(seconds)}, from {duration(max(0.0, first.start - record.start))}{after}{moved}"
    )


def _short(name: str) -> str:
    """The end of a unit's or a chunk's name: ``h.3`` of ``transformer.h.3``."""
    parts = name.split(" ")[0].split(".")
    ending = parts[-2:] if len(parts) > 1 and parts[-1].isdigit() else parts[-1:]
    return ".".join(ending)


# -- rows of tiers ------------------------------------------------------------------------------------


def _tier(filling: Filling, record: Record) -> Lane:
    peak, budget = filling.peak.total, filling.budget
    near = budget <= FAR * peak
    top = (max(peak, budget) if near else peak) * 1.06 or 1
    below = [0] * len(filling.states)
    areas = []
    for k, kind in enumerate(filling.kinds):
        above = [low + state.kinds[k] for low, state in zip(below, filling.states, strict=True)]
        areas.append(tag("path", d=_area(filling, below, above, top, record.seconds), class_=colour(kind)))
        below = above
    y = percent(1 - budget / top)
    line = tag("line", x1=0, x2="100%", y1=y, y2=y, class_="budget") if budget and near else None
    facts = [f"peak {size(peak)}"]
    if budget:
        facts += [f"{share(peak, budget)} of", f"{size(budget)} budget"]
        facts += [] if near else ["(not drawn)"]
    drawn = [
        tag("svg", areas, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%"),
        *([] if line is None else [line]),
    ]
    return Lane(filling.tier, tuple(facts), TIER, drawn)


def _area(filling: Filling, below: list[int], above: list[int], top: float, seconds: float) -> str:
    """A stretch of stairs between two heights."""
    at = [1000 * state.at / seconds for state in filling.states]
    ends = [*at[1:], 1000.0]

    def stairs(heights: list[int]) -> list[tuple[float, float]]:
        return [
            point
            for x, end, height in zip(at, ends, heights, strict=True)
            for point in ((x, 1000 - 1000 * height / top), (end, 1000 - 1000 * height / top))
        ]

    outline = stairs(above) + stairs(below)[::-1]
    return "M" + " ".join(f"{x:.5g},{y:.4g}" for x, y in outline) + "Z"
