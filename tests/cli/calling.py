"""Calling the command line from tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from outcore.cli.main import app

TINY = ("--model", "gpt2-tiny", "--host-memory", "64MiB", "--seq-len", "32", "--batch-size", "2")
"""A run of a second or two."""


def outcore(*arguments: object) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def text(folder: Path, lines: int = 400) -> Path:
    """A file of text with enough of it for a few sequences."""
    path = folder / "words.txt"
    words = ("the cat sat on the mat", "a dog ran to the sea", "we read and write all day")
    path.write_text("".join(f"{words[k % 3]}, {k} times\n" for k in range(lines)), encoding="utf-8")
    return path


def metrics(log: Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    with (log / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
