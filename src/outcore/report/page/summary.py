"""The head of the page: the run in a sentence, and its most asked numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from outcore.report.folder import Folder, Row
from outcore.report.page.markup import Markup, tag
from outcore.report.page.scale import duration, percent, share, size


def steady(rows: Sequence[Row]) -> Sequence[Row]:
    """All steps but the first, in which orders are recorded and kernels compiled; that one if it is alone."""
    return rows[1:] or rows


def mean_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of each part of a step; parts that never took any are left out."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.parts.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return {name: seconds / len(rows) for name, seconds in totals.items() if seconds > 0}


def header(folder: Folder) -> Markup:
    rows = folder.rows
    model = folder.settings.get("model", "")
    return tag(
        "header",
        tag("h1", folder.name),
        tag("div", " · ".join(filter(None, (model, _when(folder.settings.get("started", ""))))), class_="sub"),
        tag("p", lead(rows), class_="lead") if rows else None,
        tag("div", _tiles(folder), class_="tiles"),
    )  # fmt: skip


def _when(started: str) -> str:
    """A date as `outcore.report.run` writes it, for people; any other text as it is."""
    try:
        return datetime.fromisoformat(started).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return started


def lead(rows: Sequence[Row]) -> str:
    """What limits a step, in a sentence."""
    some = steady(rows)
    whole = sum(row.seconds for row in some) / len(some)
    parts = sorted(mean_parts(some).items(), key=lambda item: -item[1])
    named = ", ".join(
        f"{share(seconds, whole)} {name}" for name, seconds in parts if seconds >= 0.005 * whole
    )
    return f"A step takes {duration(whole)} (mean of {which(rows)})" + (f": {named}." if named else ".")


def which(rows: Sequence[Row]) -> str:
    some = steady(rows)
    first, last = some[0].step, some[-1].step
    return f"step {first}" if len(some) == 1 else f"steps {first} to {last}"


def _tiles(folder: Folder) -> list[Markup]:
    rows = folder.rows
    tiles = []
    if rows:
        some = steady(rows)
        whole = sum(row.seconds for row in some)
        losses = [row.loss for row in rows if row.loss is not None]
        if losses:
            tiles.append(_tile(f"{losses[-1]:.4f}", f"loss, from {losses[0]:.4f}"))
        else:
            tiles.append(_tile("not finite", "loss"))
        tiles.append(_tile(f"{sum(row.tokens for row in some) / whole:,.0f}", "tokens per second"))
        waited = sum(sum(row.waited.values()) for row in some)
        tiles.append(_tile(share(waited, whole), "of a step waits"))
        for tier, budget in rows[-1].budget.items():
            peak = rows[-1].peak.get(tier, 0.0)
            tiles.append(
                _tile(size(peak), f"{tier} peak of {size(budget)}", peak / budget if budget else None)
            )
        if rows[-1].skipped:
            tiles.append(_tile(f"{rows[-1].skipped:,.0f}", "steps skipped"))
    return tiles


def _tile(value: str, name: str, filled: float | None = None) -> Markup:
    meter = None
    if filled is not None:
        meter = tag("div", tag("i", style=f"width:{percent(min(1.0, filled))}"), class_="meter")
    return tag("div", tag("b", value), tag("span", name), meter, class_="tile")


def remarks(folder: Folder) -> Markup | None:
    if not folder.remarks:
        return None
    return tag("aside", tag("ul", [tag("li", remark) for remark in folder.remarks]), class_="remarks")
