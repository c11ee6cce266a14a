"""Which steps of a run are recorded."""

from __future__ import annotations

import re

from outcore.errors import UsageError

TRACED = "2-3,last"
"""Steps that are recorded by default: the first whose order is known, and one in which all has settled."""


def parse_steps(text: str, steps: int) -> frozenset[int]:
    """The steps that are meant by such as ``2-3,last``, ``5`` or ``none``, out of 1 to ``steps``.

    Raises:
        UsageError: it means nothing.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").lower().split(","):
        if part == "none" and text.strip().lower() == "none":
            continue
        if part == "last":
            found.add(steps)
            continue
        match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UsageError(
                f"--trace-steps is {text!r}: give numbers from 1, ranges and the word last, such as {TRACED}, or none"
            )
        found.update(range(first, min(last, steps) + 1))
    return frozenset(found)
