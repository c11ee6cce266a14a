"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

from typing import Annotated

import typer

from outcore.errors import UsageError

Device = Annotated[
    str | None,
    typer.Option(help="Where to compute: cpu, cuda, ... By default the accelerator if there is one."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes of accelerator memory, such as 14GiB. By default what is free."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes of DRAM, such as 2GiB. By default what is free."),
]
Disk = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR[:SIZE]", help="A directory for what does not fit in DRAM; may be repeated."),
]
Precision = Annotated[str, typer.Option(help="The dtype to compute in: bf16, fp16 or fp32.")]
Optimizer = Annotated[
    str,
    typer.Option(
        help="adamw, adam, sgd (momentum 0.9), lion or adagrad; adamw-bf16 and adamw-8bit keep narrower moments, not "
        "exactly."
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens of a sequence.")]
BatchSize = Annotated[int, typer.Option(help="Sequences of a batch.")]
Accumulate = Annotated[int, typer.Option(help="Batches of an optimizer step.")]
Seed = Annotated[int, typer.Option(help="Of the first weights and of all that is drawn.")]


def at_least(least: int, **values: int) -> None:
    """Check whole numbers.

    Raises:
        UsageError: one is too small.
    """
    for name, value in values.items():
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, and is {value}")


def check_seed(seed: int) -> None:
    """Check a seed.

    Raises:
        UsageError: it is not one.
    """
    at_least(0, seed=seed)
    if seed >= 1 << 63:
        raise UsageError(f"--seed must be below 2^63, and is {seed}")
