"""Options of ``outcore plan`` that no other command has."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(
        help="A preset of outcore train, llama-7b, llama-13b, llama-70b, gpt3-175b, or a Hugging Face directory "
        "or config.json. No weights are needed."
    ),
]

Machine = Annotated[
    str,
    typer.Option(
        help="rtx4080, rtx4090, a100-80g, h100, h200, gh200, a TOML file, or this (after outcore profile)."
    ),
]

Disk = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE|DIR[:SIZE]",
        help="Bytes of disk, such as 4TB, or a directory here; may be repeated. 0 for none.",
    ),
]

MicroBatch = Annotated[
    int | None,
    typer.Option(help="Sequences of one forward and backward. By default what is fastest."),
]

Activations = Annotated[
    str | None,
    typer.Option(
        metavar="WAY[,NAME=WAY]...",
        help="recompute, keep, offload or recompute+offload, as outcore train takes it. By default what is faster.",
    ),
]

SliceRows = Annotated[
    int | None,
    typer.Option(
        "--microbatch",
        metavar="N",
        help="Sequences of a slice of recomputed blocks and of the loss. By default what is fastest.",
    ),
]

ChunkSize = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that moves as one piece. By default what is faster."),
]

Nodes = Annotated[
    int, typer.Option(metavar="N", help="Nodes: says what each way of sharding does on all of them.")
]

GpusPerNode = Annotated[
    int, typer.Option(metavar="M", help="Accelerators of each node, which share its host, CPU and disks.")
]

InNetworkReduction = Annotated[
    bool, typer.Option("--in-network-reduction", help="Switches reduce and copy (as SHARP does).")
]

Ranks = Annotated[
    int | None,
    typer.Option(metavar="N", help="Ranks over which ZeRO shards, for the memory table; 1 by default."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
