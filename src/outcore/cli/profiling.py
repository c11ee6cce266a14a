"""``outcore profile``: measures this machine, for ``outcore plan --machine this``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outcore.cli import options
from outcore.cli.failures import reported
from outcore.errors import TierError


def profile(
    device: options.Device = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A directory on the disk to be measured; half a GiB is written there for a moment.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write. By default the user's cache directory."),
    ] = None,
) -> None:
    """Measure how fast this machine computes, copies, updates, and reads and writes its disk."""
    with reported():
        from outcore.memory.device import find
        from outcore.memory.places import check_place
        from outcore.model.matmuls import widen_matmuls
        from outcore.planning.machine_file import write
        from outcore.planning.measure import measure
        from outcore.planning.this import profile_path

        widen_matmuls()
        where = find(device)
        folder = None if disk is None else check_place(disk).path
        path = output or profile_path()
        found = measure(where, folder, lambda text: typer.echo(f"measuring {text}", err=True))
        text = write(found)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TierError(f"the profile can't be written to {path}: {error.strerror or error}") from None
        typer.echo(text)
        typer.echo(f"written to {path}", err=True)
