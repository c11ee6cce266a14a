"""Lines over logarithmic axes as an SVG file of its own, so that a report needs no plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 560, 320, 64, 44, 30, 130
COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea")

Points = Sequence[tuple[float, float]]


def write_plot(path: Path, title: str, across: str, up: str, lines: Mapping[str, Points]) -> None:
    """Draw lines with a mark at each point; all numbers must be positive.

    Args:
        across: what the horizontal axis counts.
        up: what the vertical axis counts.
        lines: points by the name of their line.
    """
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    low_x, high_x, low_y, high_y = (
        _decade(min(xs), -1),
        _decade(max(xs), 1),
        _decade(min(ys), -1),
        _decade(max(ys), 1),
    )

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x / low_x) / math.log10(high_x / low_x)) * (WIDTH - LEFT - RIGHT)
        above = (math.log10(y / low_y) / math.log10(high_y / low_y)) * (HEIGHT - TOP - BOTTOM)
        return LEFT + right, HEIGHT - BOTTOM - above

    parts = [f'<text x="{LEFT}" y="18" font-size="14">{html.escape(title)}</text>']
    for x in _ticks(low_x, high_x):
        at, _ = place(x, low_y)
        parts.append(_rule(at, TOP, at, HEIGHT - BOTTOM))
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{x:g}</text>')
    for y in _ticks(low_y, high_y):
        _, at = place(low_x, y)
        parts.append(_rule(LEFT, at, WIDTH - RIGHT, at))
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
        placed = [place(x, y) for x, y in sorted(points)]
        path_of = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path_of}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        x, y = placed[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{html.escape(name)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(across)}</text>')
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{html.escape(up)}</text>'
    )
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    path.write_text("\n".join([head, ground, *parts, "</svg>"]) + "\n", "utf-8")


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _decade(value: float, side: int) -> float:
    """The nearest of 1, 2 and 5 times a power of ten below or above."""
    base = 10 ** math.floor(math.log10(value))
    steps = [base * step for step in (0.5, 1, 2, 5, 10)]
    return (
        max(s for s in steps if s < value)
        if side < 0
        else min(s for s in steps if s > value or s == 10 * base)
    )


def _ticks(low: float, high: float) -> list[float]:
    found, power = [], math.floor(math.log10(low))
    while 10**power <= high:
        found += [
            step * 10**power
            for step in (1, 2, 5)
            if low <= step * 10**power * 1.0000001 and step * 10**power <= high * 1.0000001
        ]
        power += 1
    return found
