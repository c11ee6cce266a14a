"""Times of tapes that were run on this machine, kept from one plan to the next."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path

import torch

LIMIT = 4 << 20
"""Bytes that the file may have. A larger one is begun anew."""


class Timebook:
    """Seconds by the signature of a tape.

    Args:
        path: where they are kept; ``None``: nowhere. A file that can't be read or written costs the time to measure
            again, and is no error.
        profiled: the date of the machine's profile: what was found before another is out of date.
    """

    def __init__(self, path: Path | None = None, profiled: str = "") -> None:
        self._path = path
        self._under = f"{profiled}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        self._found = self._read()

    def get(self, signature: str) -> float | None:
        return self._found.get(signature)

    def put(self, signature: str, seconds: float) -> None:
        self._found[signature] = seconds
        if self._path is not None:
            self._keep(self._path)

    def _read(self) -> dict[str, float]:
        if self._path is None:
            return {}
        try:
            if self._path.stat().st_size > LIMIT:
                return {}
            table = json.loads(self._path.read_text(encoding="utf-8"))
            found = table["seconds"] if table["under"] == self._under else {}
            return {str(name): float(s) for name, s in found.items() if 0 <= float(s) < math.inf}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _keep(self, path: Path) -> None:
        """Write what was found, as a whole or not at all."""
        text = json.dumps({"under": self._under, "seconds": self._found})
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
