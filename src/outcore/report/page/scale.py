"""Axes: round numbers to put beside them, positions in percent, and numbers in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from outcore.memory.sizes import format_size

Format = Callable[[float], str]


def percent(value: float) -> str:
    """A position or length within a plot, as an attribute."""
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About ``wanted`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def plain(values: Sequence[float]) -> Format:
    """Decimals enough to tell ticks apart."""
    gap = min((b - a for a, b in pairwise(values)), default=1.0)
    digits = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    if digits and abs(gap * 10**digits - round(gap * 10**digits)) > 1e-6:
        digits += 1
    return lambda value: f"{value:,.{digits}f}"


def size(nbytes: float) -> str:
    """Bytes in words."""
    return format_size(int(nbytes))


def duration(seconds: float) -> str:
    """Seconds in words, to three figures."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for below, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms")):
        if seconds < below:
            return f"{_three(seconds * factor)} {unit}"
    if seconds < 120:
        return f"{_three(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def rate(nbytes: float, seconds: float) -> str:
    """Bytes per second in words, to three figures."""
    if seconds <= 0:
        return "-"
    found = nbytes / seconds
    for least, factor, unit in ((1e8, 1e9, "GB/s"), (1e5, 1e6, "MB/s")):
        if found >= least:
            return f"{_three(found / factor)} {unit}"
    return f"{_three(found / 1e3)} kB/s" if found else "0 GB/s"


def share(part: float, whole: float) -> str:
    """A part in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _three(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}"
