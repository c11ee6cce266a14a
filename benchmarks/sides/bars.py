"""Bars beside their names as an SVG file of its own, so that a report needs no plotting library."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path

WIDTH, LEFT, RIGHT, TOP, ROW = 560, 190, 60, 34, 22
COLOURS = ("#2563eb", "#dc2626")


def write_bars(path: Path, title: str, bars: Mapping[str, Mapping[str, float]], mark: float = 1.0) -> None:
    """Draw one bar a number, all from 0 on, and a rule at ``mark``; no number may be negative.

    Args:
        bars: numbers by the name of their series, by the name of their row.
    """
    series = list(dict.fromkeys(name for numbers in bars.values() for name in numbers))
    top = max([mark, *(value for numbers in bars.values() for value in numbers.values())])
    height = TOP + sum(ROW * max(1, len(numbers)) // 2 + 12 for numbers in bars.values()) + 12
    parts = [f'<text x="8" y="18" font-size="14">{html.escape(title)}</text>']
    for place, name in enumerate(series):
        x = WIDTH - RIGHT - 110 * (len(series) - place)
        parts.append(f'<rect x="{x}" y="9" width="10" height="10" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="18">{html.escape(name)}</text>')
    y = TOP
    scale = (WIDTH - LEFT - RIGHT) / top
    for row, numbers in bars.items():
        tall = ROW * max(1, len(numbers)) // 2
        middle = y + tall / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">{html.escape(row)}</text>')
        for place, (name, value) in enumerate(numbers.items()):
            colour = COLOURS[series.index(name) % len(COLOURS)]
            at = y + place * ROW // 2
            long = value * scale
            parts.append(f'<rect x="{LEFT}" y="{at}" width="{long:.1f}" height="9" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + long + 4:.1f}" y="{at + 8}" font-size="9">{value:.2f}</text>')
        y += tall + 12
    at = LEFT + mark * scale
    parts.append(f'<line x1="{at:.1f}" y1="{TOP - 6}" x2="{at:.1f}" y2="{y}" stroke="#555"/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    path.write_text("\n".join([head, ground, *parts, "</svg>"]) + "\n", "utf-8")
