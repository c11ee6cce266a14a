"""Options of ``outcore train`` that no other command has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outcore.cli.settings import EVERY, KEEP

Model = Annotated[
    str,
    typer.Option(
        help="A Hugging Face directory (config.json and safetensors), or a preset to train anew: gpt2, "
        "gpt2-medium, gpt2-large, gpt2-xl, gpt2-1.3b (24 layers, 2048 wide, 16 heads) or gpt2-tiny. "
        "Presets have dropout 0.0."
    ),
]

Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="A text file or a folder of them; may be repeated. The word stdlib, the default, means the "
        "source files of Python's standard library.",
    ),
]

Steps = Annotated[int, typer.Option(help="Optimizer steps.")]

Lr = Annotated[
    float | None,
    typer.Option(
        help="Learning rate, constant. By default one that suits the optimizer: for adamw 6e-4 on "
        "gpt2, down to 2e-4 on gpt2-1.3b, and 5e-5 on a directory's weights."
    ),
]

Clip = Annotated[float, typer.Option(help="Largest norm of the gradient; 0 for no clipping.")]

Activations = Annotated[
    str | None,
    typer.Option(
        metavar="WAY[,NAME=WAY]...",
        help="What blocks do with their activations until the backward pass: recompute, keep, offload (to the next "
        "tier) or recompute+offload (the inputs of recomputed blocks go there); NAME=WAY for single blocks, such "
        "as offload,h.0=keep. By default recompute, or what --plan auto finds.",
    ),
]

Plan = Annotated[
    str,
    typer.Option(
        help="auto simulates the run first, with the profile of this machine (outcore profile), and takes the "
        "fastest settings that fit of those that leave the result as it is; none doesn't."
    ),
]

Logits = Annotated[
    str,
    typer.Option(
        metavar="WAY",
        help="recompute or keep the logits of a head that runs in slices (--microbatch): keep takes 2 bytes for each "
        "in 16 bits and saves one of four products of the head's size.",
    ),
]

SliceRows = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Sequences of a slice: recomputed blocks, and the head with its loss, run each batch in slices, so "
        "that what streams is fetched once for the whole batch. By default a batch is run as one.",
    ),
]

LogDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="For metrics.jsonl, TensorBoard, trace.json and the tokenizer. By default that of --checkpoint, or "
        "else runs/MODEL-DATE-TIME.",
    ),
]

TraceSteps = Annotated[
    str,
    typer.Option(
        metavar="STEPS",
        help="Steps to record in trace.json, for outcore report and Perfetto: numbers, ranges and the word "
        "last; or none.",
    ),
]

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Save the run there: every so many steps, at the end, and when stopped."
    ),
]

Every = Annotated[
    int | None, typer.Option(metavar="N", help=f"Steps between two checkpoints; {EVERY} by default.")
]

Keep = Annotated[
    int | None, typer.Option(metavar="K", help=f"The newest checkpoints to keep; {KEEP} by default.")
]

Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint, or begin if there is none.")
]

Grace = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="After SIGINT or SIGTERM, the time to finish the step and save; 300 by default.",
    ),
]

Sharding = Annotated[
    str,
    typer.Option(
        help="Under torchrun, what each rank keeps only its slice of: parameters (and gradients and the "
        "optimizer's states), gradients (and states), optimizer (states), or none."
    ),
]

Split = Annotated[
    str,
    typer.Option(
        help="Under torchrun, how a batch is divided among ranks: even, or by speed, in proportion to what each "
        "rank does in a second, as it is measured."
    ),
]

Sums = Annotated[
    str,
    typer.Option(
        help="Under torchrun, when gradients are summed over ranks: after each backward, or once a step, which "
        "sends less with --accumulate and keeps them whole until then."
    ),
]
