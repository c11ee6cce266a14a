"""``outcore report``: what a run came to, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outcore.cli.failures import reported
from outcore.errors import UsageError


def report(
    log_dir: Annotated[Path, typer.Argument(metavar="LOG_DIR", help="The log directory of outcore train.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write. By default report.html in the log directory."),
    ] = None,
) -> None:
    """Write a page that shows a run: loss, throughput, memory per tier, and what happened when within a step."""
    with reported():
        from outcore.report.folder import read
        from outcore.report.page.page import page

        text = page(read(log_dir))
        path = output or log_dir / "report.html"
        try:
            path.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"the report can't be written to {path}: {error.strerror or error}") from None
        typer.echo(f"report in {path}")
