"""``outcore generate``: text from a model whose weights are streamed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from outcore.cli import options
from outcore.cli.failures import reported
from outcore.errors import UsageError


def generate(
    model: Annotated[str, typer.Option(help="A Hugging Face directory with weights and a tokenizer.")],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A text to go on from; several, each with its --prompt, are one batch."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A file with a prompt in each line, after those of --prompt.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens to add.")] = 64,
    device: options.Device = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    precision: options.Precision = "bf16",
    seed: options.Seed = 0,
    temperature: Annotated[
        float, typer.Option(help="Of sampling; 0, the default, always takes the likeliest token.")
    ] = 0.0,
    lookup: Annotated[
        int,
        typer.Option(
            help="Guess so many tokens from what the text repeats, and check them all in one pass over the weights; "
            "for a single prompt."
        ),
    ] = 0,
) -> None:
    """Continue texts. They go to stdout, prompts included, and everything else to stderr.

    A single text comes as it is; of several each is a line of JSON with "prompt" and "text".
    """
    with reported():
        options.at_least(1, max_new_tokens=max_new_tokens)
        options.at_least(0, lookup=lookup)
        options.check_seed(seed)
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise UsageError(f"--temperature must be 0 or more, and is {temperature}")
        prompts = [*(prompt or []), *([] if prompt_file is None else _lines(prompt_file))]
        if not prompts:
            raise UsageError("there is nothing to go on from: give --prompt or --prompt-file")
        if lookup and len(prompts) > 1:
            raise UsageError(
                "--lookup works on a single prompt: a batch shares each pass over the weights already"
            )
        import outcore
        from outcore.memory.device import find

        place = find(device)
        budget = outcore.Budget(device=device_memory, host=host_memory, disk=disk or None)
        settings = outcore.Precision(precision)  # type: ignore[arg-type]
        how: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else _GREEDY
        how = {**how, "max_new_tokens": max_new_tokens}
        if lookup:
            how["prompt_lookup_num_tokens"] = lookup
        texts = _run(model, prompts, how, place, budget, settings, seed)
        if len(texts) == 1:
            typer.echo(texts[0])
        else:
            for asked, text in zip(prompts, texts, strict=True):
                typer.echo(json.dumps({"prompt": asked, "text": text}, ensure_ascii=False))


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"the prompts of {path} can't be read: {reason}") from None


def _run(
    name: str, prompts: list[str], how: dict[str, Any], device: Any, budget: Any, precision: Any, seed: int
) -> list[str]:
    import torch

    import outcore
    from outcore.cli.plan import model_line, tiers
    from outcore.integrations.transformers import build
    from outcore.report.console import make_console, show_plan
    from outcore.report.placement import SETTLED, placement, since

    outcore.widen_matmuls()
    built = build(name, training=False)
    if built.weights is None:
        raise UsageError(
            f"the preset {name} has no weights: generate needs a directory with config.json and weights"
        )
    if built.tokenizer is None:
        raise UsageError(f"{name} has no tokenizer, which generate needs for the prompt")
    ids, mask, how["pad_token_id"] = _batch(built.tokenizer, prompts, device)
    count = how["max_new_tokens"]
    if built.positions is not None and ids.shape[1] + count > built.positions:
        raise UsageError(
            f"{ids.shape[1]} tokens of prompt and {count} new ones are more than the {built.positions} "
            f"positions of {name}: shorten one of them"
        )
    with outcore.Interrupts(grace=None, ending="this pass") as interrupts:
        console = make_console(stderr=True)
        passes: list[outcore.Snapshot] = []

        def stop(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            interrupts.check()
            if len(passes) < SETTLED:
                passes.append(outcore.snapshot(built.model))
                if len(passes) == SETTLED:
                    console.print(placement(passes[-1], since(passes[-2], passes[-1]), "pass"))
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

        outcore.offload(built.model, budget=budget, precision=precision, device=device, weights=built.weights)
        try:
            interrupts.check()
            lines = {"model": model_line(built, seed), **tiers(built, [str(d.path) for d in budget.disks()])}
            show_plan(console, lines)
            torch.manual_seed(seed)
            out = built.model.generate(ids, attention_mask=mask, stopping_criteria=[stop], **how)
        finally:
            outcore.release(built.model)
    starts = (ids.shape[1] - mask.sum(1)).tolist()
    return [
        str(built.tokenizer.decode(row[start:], skip_special_tokens=True))
        for row, start in zip(out, starts, strict=True)
    ]


def _batch(tokenizer: Any, prompts: list[str], device: Any) -> tuple[Any, Any, int]:
    """Tokens and mask, both of shape (prompts, longest), and the token that fills the left of what is shorter."""
    import torch

    rows = [tokenizer(prompt).input_ids for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        if not row:
            raise UsageError(f"the prompt {prompt!r} gives no tokens: write at least one word")
    known = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None]
    filler = int(known[0]) if known else 0
    longest = max(map(len, rows))
    ids = torch.tensor([[filler] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask, filler


_GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
