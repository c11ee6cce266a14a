"""Charts over the steps of a run: a curve of one number, and columns of what a step's time is made of.

Both stretch with the page: what is drawn is placed in percent, so that text keeps its size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outcore.report.page.markup import Markup, tag
from outcore.report.page.scale import Format, duration, percent, plain, share, ticks

Place = Callable[[float], float]
"""Where a number lies in a plot, from 0 to 1."""

BINS = 600
"""The most points of a curve; more steps than that share one, as their mean and their range."""

COLUMNS = 100
"""The most columns of a chart of columns."""


@dataclass(frozen=True)
class Point:
    """A step, or neighbours taken together; without ``mean`` there is a hole in the curve."""

    first: int
    last: int
    low: float
    mean: float | None
    high: float

    @property
    def at(self) -> float:
        return (self.first + self.last) / 2

    @property
    def steps(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def binned(values: Sequence[tuple[int, float | None]], most: int = BINS) -> list[Point]:
    """At most ``most`` points of (step, value)."""
    width = max(1, -(-len(values) // most))
    found = []
    for start in range(0, len(values), width):
        part = values[start : start + width]
        known = [value for _, value in part if value is not None]
        mean = sum(known) / len(known) if known else None
        found.append(Point(part[0][0], part[-1][0], min(known, default=0.0), mean, max(known, default=0.0)))
    return found


def curve(title: str, values: Sequence[tuple[int, float | None]], *, zero: bool, words: Format) -> Markup:
    """A curve over steps.

    Args:
        zero: whether the axis starts at 0.
        words: how a value is said when pointed at.
    """
    points = binned(values)
    known = [point for point in points if point.mean is not None]
    if not known:
        return tag(
            "figure", tag("figcaption", title), tag("p", "No finite number.", class_="none"), class_="chart"
        )
    low, high = min(p.low for p in known), max(p.high for p in known)
    low = 0.0 if zero else low
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom, top = (0.0 if zero else low - margin), high + margin
    left, right = points[0].first, points[-1].last

    def x(step: float) -> float:
        return (step - left) / (right - left) if right > left else 0.5

    def y(value: float) -> float:
        return 1 - (value - bottom) / (top - bottom)

    marks = ticks(bottom, top, 4)
    said = plain(marks)
    told = [
        [round(x(p.at), 5), round(y(p.mean), 5), f"{p.steps}: {words(p.mean)}{_range(p, words)}"]
        for p in known
        if p.mean is not None
    ]
    drawn = tag(
        "svg",
        [_rule(y(m)) for m in marks],
        tag("svg", _band(points, x, y), _lines(points, x, y), viewBox="0 0 1000 1000",
            preserveAspectRatio="none", width="100%", height="100%"),
        [tag("circle", cx=percent(px), cy=percent(py), r=2.5, class_="dot") for px, py, _ in told
         if isinstance(px, float) and isinstance(py, float)] if len(told) <= 60 else None,
        role="img", aria_label=f"{title}: from {words(known[0].mean or 0.0)} to {words(known[-1].mean or 0.0)}",
        width="100%", height="100%",
    )  # fmt: skip
    return frame(
        title, drawn, [(y(m), said(m)) for m in marks], step_marks(left, right), points=json.dumps(told)
    )


def _range(point: Point, words: Format) -> str:
    return "" if point.first == point.last else f" (from {words(point.low)} to {words(point.high)})"


def _lines(points: Sequence[Point], x: Place, y: Place) -> list[Markup]:
    """Each unbroken stretch of the curve."""
    stretches: list[list[str]] = [[]]
    for point in points:
        if point.mean is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{1000 * x(point.at):.2f},{1000 * y(point.mean):.2f}")
    return [tag("polyline", points=" ".join(part), class_="curve") for part in stretches if part]


def _band(points: Sequence[Point], x: Place, y: Place) -> Markup | None:
    known = [point for point in points if point.mean is not None]
    if all(point.low == point.high for point in known):
        return None
    there = [f"{1000 * x(p.at):.2f},{1000 * y(p.high):.2f}" for p in known]
    back = [f"{1000 * x(p.at):.2f},{1000 * y(p.low):.2f}" for p in reversed(known)]
    return tag("path", d="M" + " L".join(there + back) + " Z", class_="band")


def _rule(at: float) -> Markup:
    return tag("line", x1="0", x2="100%", y1=percent(at), y2=percent(at), class_="grid")


def step_marks(left: int, right: int) -> list[tuple[float, str]]:
    """Where steps are named below a chart."""
    if right <= left:
        return [(0.5, str(left))]
    marks = [left, *(int(m) for m in ticks(left, right, 6) if m == int(m) and left < m < right), right]
    width = right - left
    kept = [m for m in marks if m in (left, right) or min(m - left, right - m) > 0.08 * width]
    return [((m - left) / width, f"{m:,}") for m in dict.fromkeys(kept)]


def frame(
    title: str,
    drawn: Markup,
    side: Sequence[tuple[float, str]],
    below: Sequence[tuple[float, str]],
    *,
    points: str | None = None,
    legend: Markup | None = None,
) -> Markup:
    """A chart with its title, the numbers at its side and the steps below."""
    return tag(
        "figure",
        tag("figcaption", title),
        legend,
        tag(
            "div",
            tag("div", [tag("span", text, style=f"top:{percent(at)}") for at, text in side], class_="side"),
            tag("div", drawn, class_="plot", tabindex="0", data_points=points),
            tag(
                "div", [tag("span", text, style=f"left:{percent(at)}") for at, text in below], class_="below"
            ),
            class_="axes",
        ),
        tag("div", "step", class_="unit"),
        class_="chart",
    )


# -- columns ------------------------------------------------------------------------------------------


def columns(title: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]]) -> Markup:
    """What each step's seconds are made of.

    Args:
        parts: a part's name to its seconds in each step; drawn from below.
    """
    names = list(parts)
    width = max(1, -(-len(steps) // COLUMNS))
    starts = range(0, len(steps), width)
    means = [
        [sum(parts[name][s : s + width]) / len(parts[name][s : s + width]) for name in names] for s in starts
    ]
    top = max(map(sum, means)) * 1.05 or 1.0
    bars = []
    for k, (start, mean) in enumerate(zip(starts, means, strict=True)):
        last = min(start + width, len(steps)) - 1
        which = Point(steps[start], steps[last], 0, 0, 0).steps
        whole = sum(mean)
        told = "; ".join(
            f"{name} {duration(s)} ({share(s, whole)})" for name, s in zip(names, mean, strict=True) if s
        )
        at, rects = 1.0, []
        for name, seconds in zip(names, mean, strict=True):
            at -= seconds / top
            if seconds:
                rects.append(
                    tag("rect", x=percent((k + 0.08) / len(means)), width=percent(0.84 / len(means)),
                        y=percent(at), height=percent(seconds / top), class_=colour(name))
                )  # fmt: skip
        bars.append(tag("g", rects, data_tip=f"{which}: {duration(whole)}\n{told}"))
    marks = ticks(0, top, 4)
    said = plain(marks)
    drawn = tag(
        "svg",
        [_rule(1 - m / top) for m in marks],
        bars,
        role="img", aria_label=title, width="100%", height="100%",
    )  # fmt: skip
    below = [
        ((k + 0.5) / len(means), f"{steps[start]:,}")
        for k, start in enumerate(starts)
        if k % max(1, -(-len(means) // 10)) == 0
    ]
    return frame(title, drawn, [(1 - m / top, f"{said(m)} s") for m in marks], below, legend=legend(names))


def legend(names: Sequence[str]) -> Markup:
    """Names with their colours."""
    swatch = [
        tag("span", tag("svg", tag("rect", width="100%", height="100%", rx=2, class_=colour(name)),
                        width=14, height=14, aria_hidden="true"), " ", name)
        for name in names
    ]  # fmt: skip
    return tag("div", swatch, class_="legend")


KNOWN = frozenset(
    {
        "compute", "forward", "backward", "read", "outside", "outside units", "update", "waiting", "device waiting",
        "disk read", "disk write", "device in", "device out",
        "waiting for disk read", "waiting for disk write", "waiting for device in", "waiting for device out",
        "parameters", "gradients", "optimizer states", "activations", "buffers",
    }
)  # fmt: skip


def colour(name: str) -> str:
    """The class that colours a part; one colour for all that is not known."""
    return f"c-{name.replace(' ', '-')}" if name in KNOWN else "c-other"
