"""``outcore export``: a checkpoint as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outcore.cli.failures import reported
from outcore.errors import CheckpointError, UsageError

TOKENIZER = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""The files that a checkpoint may bring along: its names are not trusted."""


def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A checkpoint, or a directory of several: then the newest.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new directory; it must not exist.")],
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bf16, fp16 or fp32. By default bf16.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face directory or a preset with the model's configuration. By default what outcore train "
            "keeps in the checkpoint."
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            "--format",
            help="hf for a Hugging Face directory; dcp for one of torch.distributed.checkpoint, with the optimizer.",
        ),
    ] = "hf",
) -> None:
    """Write a checkpoint as a Hugging Face directory: safetensors shards, configuration, tokenizer."""
    with reported():
        if layout not in ("hf", "dcp"):
            raise UsageError(f"unknown format {layout!r}; choose hf or dcp")
        if layout == "dcp" and dtype is not None:
            raise UsageError(
                "--dtype has no meaning with --format dcp, which keeps full precision: leave it out"
            )
        from outcore.checkpoint.dcp.write import to_dcp
        from outcore.checkpoint.export import export_stored

        checkpoint = newest(directory)
        network, texts = _described(checkpoint, model, needed=layout == "hf")
        if layout == "dcp":
            to_dcp(checkpoint, out, network)
        else:
            export_stored(checkpoint, out, network, dtype or "bf16", texts)  # type: ignore[arg-type]
        typer.echo(f"{checkpoint} written to {out}")


def newest(directory: Path) -> Path:
    """The checkpoint that is meant: the directory itself, or the newest in it whose files are whole.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, and none is whole.
    """
    from outcore.checkpoint.manifest import NAME
    from outcore.checkpoint.series import Checkpoints

    if (directory / NAME).is_file():
        return directory
    series = Checkpoints(directory)
    found = series.latest()
    if found is None:
        if series.steps():
            raise CheckpointError(
                f"no checkpoint in {directory} is whole: outcore inspect {directory} tells more"
            )
        raise UsageError(f"{directory} is no checkpoint and holds none: it has neither {NAME} nor step-N")
    return found


def _described(checkpoint: Path, name: str | None, needed: bool) -> tuple[Any, dict[str, str]]:
    """The model on meta, and the files of its tokenizer; no model if there is none and it is not needed."""
    from outcore.checkpoint.load import extra_of
    from outcore.cli.tokens import Given
    from outcore.integrations.transformers import build, from_config

    if name is not None:
        built = build(name, training=False)
        return built.model, {} if built.tokenizer is None else Given(built.tokenizer).files()
    extra = extra_of(checkpoint)
    config = extra.get("model") if isinstance(extra, dict) else None
    if not isinstance(config, dict) and not needed:
        return None, {}
    if not isinstance(config, dict):
        raise UsageError(
            f"{checkpoint} was not written by outcore train and does not tell its model: give --model with a "
            "directory that has its config.json"
        )
    kept = extra.get("tokenizer")
    files = kept if isinstance(kept, dict) else {}
    texts = {k: text for k, text in files.items() if k in TOKENIZER and isinstance(text, str)}
    return from_config(config, str(checkpoint)), texts
