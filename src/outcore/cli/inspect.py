"""``outcore inspect``: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outcore.cli.failures import reported
from outcore.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from outcore.checkpoint.manifest import Manifest
    from outcore.checkpoint.reader import Reader
    from outcore.checkpoint.series import Checkpoints


def inspect(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a directory of several.")
    ],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read every byte and compare all digests; exit code 1 if one differs."),
    ] = False,
) -> None:
    """List a checkpoint: names, dtypes, shapes, bytes; of a directory of several, each one in a line."""
    with reported():
        from outcore.checkpoint.manifest import NAME
        from outcore.checkpoint.reader import opened
        from outcore.checkpoint.series import Checkpoints

        if (directory / NAME).is_file():
            with opened(directory) as reader:
                _say(_head(directory, reader.manifest))
                damaged, total = _tensors(reader, verify)
        else:
            series = Checkpoints(directory)
            if not series.steps():
                raise UsageError(
                    f"{directory} is no checkpoint and holds none: it has neither {NAME} nor step-N"
                )
            damaged, total = _series(series, verify)
        if damaged:
            kind = "tensors" if (directory / NAME).is_file() else "checkpoints"
            raise CheckpointError(f"{damaged} of {total} {kind} in {directory} are damaged")


def _say(lines: Iterator[str]) -> None:
    for line in lines:
        typer.echo(printable(line))


def printable(text: str) -> str:
    """A text that changes nothing but itself on a terminal: names in a file may hold control characters."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _head(directory: Path, manifest: Manifest) -> Iterator[str]:
    from outcore.memory.sizes import format_size

    yield f"checkpoint  {directory}"
    optimizer = manifest.optimizer
    if optimizer is None:
        yield "optimizer   none"
    else:
        steps = max(optimizer.steps.values(), default=0)
        scale = "" if optimizer.scale is None else f", loss scale {optimizer.scale.value:g}"
        yield f"step        {steps}, {optimizer.skipped_steps} skipped"
        yield f"optimizer   {optimizer.kind}, {len(optimizer.groups)} parameter groups{scale}"
    yield f"files       {len(manifest.files)}, {manifest.nbytes:,} bytes ({format_size(manifest.nbytes)})"
    yield f"tensors     {len(manifest.pieces())}"


def _tensors(reader: Reader, verify: bool) -> tuple[int, int]:
    """Print a line for each tensor; how many are damaged, of how many."""
    from outcore.checkpoint.pieces import dtype_name
    from outcore.checkpoint.reader import fault

    pieces = reader.manifest.named_pieces()
    damaged = 0
    for name, piece in pieces:
        said = ""
        if verify:
            wrong = fault(reader, piece)
            damaged += bool(wrong)
            said = "  damaged" if wrong else "  ok     "
        line = f"{dtype_name(piece.dtype):8}{list(piece.shape)!s:20}{piece.nbytes:>16,}{said}  {name}"
        typer.echo(printable(line))
    return damaged, len(pieces)


def _series(series: Checkpoints, verify: bool) -> tuple[int, int]:
    """Print a line for each checkpoint; how many are damaged, of how many."""
    from outcore.checkpoint.reader import fault, opened

    damaged, steps = 0, series.steps()
    for step in steps:
        try:
            with opened(series.path(step)) as reader:
                pieces = reader.manifest.named_pieces()
                wrong = [fault(reader, piece) for _, piece in pieces] if verify else []
                state = next(filter(None, wrong), "ok" if verify else "files are whole")
                size = f"{reader.manifest.nbytes:>16,} bytes {len(pieces):>7} tensors"
                damaged += any(wrong)
        except CheckpointError as error:
            size, state = f"{'?':>16} bytes {'?':>7} tensors", str(error)
            damaged += 1
        typer.echo(printable(f"step {step:>10} {size}  {state}"))
    return damaged, len(steps)
