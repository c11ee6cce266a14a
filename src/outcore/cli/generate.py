"""``outcore generate``: text from a model whose weights are streamed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from outcore.cli import options
from outcore.cli.failures import reported
from outcore.errors import UsageError


def generate(
    model: Annotated[str, typer.Option(help="A Hugging Face directory with weights and a tokenizer.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
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
) -> None:
    """Continue a text. The text, prompt included, goes to stdout and everything else to stderr."""
    with reported():
        options.at_least(1, max_new_tokens=max_new_tokens)
        options.check_seed(seed)
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise UsageError(f"--temperature must be 0 or more, and is {temperature}")
        import outcore
        from outcore.memory.device import find

        place = find(device)
        budget = outcore.Budget(device=device_memory, host=host_memory, disk=disk or None)
        settings = outcore.Precision(precision)  # type: ignore[arg-type]
        typer.echo(_run(model, prompt, max_new_tokens, place, budget, settings, seed, temperature))


def _run(
    name: str,
    prompt: str,
    count: int,
    device: Any,
    budget: Any,
    precision: Any,
    seed: int,
    temperature: float,
) -> str:
    import torch

    import outcore
    from outcore.cli.plan import model_line, tiers
    from outcore.integrations.transformers import build
    from outcore.report.console import make_console, show_plan

    built = build(name, training=False)
    if built.weights is None:
        raise UsageError(
            f"the preset {name} has no weights: generate needs a directory with config.json and weights"
        )
    if built.tokenizer is None:
        raise UsageError(f"{name} has no tokenizer, which generate needs for the prompt")
    ids = built.tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        raise UsageError("the prompt gives no tokens: write at least one word")
    if built.positions is not None and ids.shape[1] + count > built.positions:
        raise UsageError(
            f"{ids.shape[1]} tokens of prompt and {count} new ones are more than the {built.positions} "
            f"positions of {name}: shorten one of them"
        )
    with outcore.Interrupts(grace=None, ending="this pass") as interrupts:

        def stop(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            interrupts.check()
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

        outcore.offload(built.model, budget=budget, precision=precision, device=device, weights=built.weights)
        try:
            interrupts.check()
            lines = {"model": model_line(built, seed), **tiers(built, [str(d.path) for d in budget.disks()])}
            show_plan(make_console(stderr=True), lines)
            torch.manual_seed(seed)
            how = {"do_sample": True, "temperature": temperature} if temperature > 0 else _GREEDY
            out = built.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                stopping_criteria=[stop],
                **how,
            )
        finally:
            outcore.release(built.model)
    return str(built.tokenizer.decode(out[0], skip_special_tokens=True))


_GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
