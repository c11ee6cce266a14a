"""The console command ``outcore``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from outcore.cli.export import export
from outcore.cli.failures import INTERRUPTED, reported
from outcore.cli.generate import generate
from outcore.cli.inspect import inspect
from outcore.cli.planning import plan
from outcore.cli.profiling import profile
from outcore.cli.report import report
from outcore.cli.train import train

app = typer.Typer(
    name="outcore",
    help="Train and run PyTorch models whose states do not fit in accelerator memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(generate)
app.command()(plan)
app.command()(profile)
app.command()(report)
app.command()(inspect)
app.command()(export)


def _version(wanted: bool) -> None:
    if wanted:
        import outcore

        typer.echo(f"outcore {outcore.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train and run PyTorch models whose states do not fit in accelerator memory."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. What goes wrong is one line on stderr; see `outcore.cli.failures`."""
    code: object
    try:
        with reported():
            code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except typer.Abort:
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
