"""What a run is about to do, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import outcore
from outcore.memory import cores
from outcore.memory.sizes import format_size
from outcore.model.matmuls import is_widening, slow_dtypes
from outcore.model.slices.heads import runs_loss_in_slices
from outcore.offloaded import engine_of
from outcore.report.metrics import has_tensorboard

if TYPE_CHECKING:
    import torch

    from outcore.cli.settings import Settings
    from outcore.integrations.transformers import Built
    from outcore.planning.plan import Plan


def describe(
    settings: Settings,
    built: Built,
    data: str,
    lr: float,
    device: torch.device,
    searched: Plan | None = None,
) -> dict[str, str]:
    """The effective plan of a training run, once the model is offloaded."""
    blocks = engine_of(built.model).activations
    per_step = settings.batch_size * settings.seq_len * settings.accumulate
    accumulated = f" x {settings.accumulate} batches" if settings.accumulate > 1 else ""
    clip = f"clipped to norm {settings.clip:g}" if settings.clip > 0 else "not clipped"
    board = (
        "metrics.jsonl and TensorBoard" if has_tensorboard() else "metrics.jsonl (TensorBoard not installed)"
    )
    return {
        "model": model_line(built, settings.seed),
        "data": data,
        "step": f"{settings.batch_size} x {settings.seq_len} tokens{accumulated} = {per_step:,} tokens; "
        f"{settings.steps} steps; seed {settings.seed}",
        "optimizer": f"{settings.optimizer.lower()}, learning rate {lr:g}, gradient {clip}",
        "compute": f"{settings.precision} on {device}{_widened(settings, device)}, activations: {blocks}"
        f"{_slices(settings, built)}",
        **tiers(built, settings.disk),
        **({} if searched is None else {"plan": _planned(searched)}),
        "log": f"{settings.log_dir}: {board}",
    }


def _planned(plan: Plan) -> str:
    return (
        f"the fastest of {plan.tried} simulated: a step in {plan.outcome.seconds:.3g} s, "
        f"{plan.tokens_per_second:,.0f} tokens/s, bound by {plan.bottleneck}; chunks of {format_size(plan.chunk_bytes)}"
    )


def _widened(settings: Settings, device: torch.device) -> str:
    slow = device.type == "cpu" and outcore.Precision(settings.precision).dtype in slow_dtypes()  # type: ignore[arg-type]
    return (
        " (which it has no instructions for: matrices are multiplied as fp32)"
        if slow and is_widening()
        else ""
    )


def _slices(settings: Settings, built: Built) -> str:
    if settings.microbatch is None:
        return ""
    loss = "head and loss too" if runs_loss_in_slices(built.model) else "head and loss as one"
    loss += ", logits kept" if settings.logits == "keep" else ""
    plural = "" if settings.microbatch == 1 else "s"
    return f" in slices of {settings.microbatch} sequence{plural}, {loss}"


def model_line(built: Built, seed: int) -> str:
    """The model, its size and where its weights come from."""
    units = len(engine_of(built.model).units)
    weights = f"new weights from seed {seed}" if built.weights is None else f"weights of {built.weights}"
    return f"{built.name}, {built.parameters:,} parameters in {units} units, {weights}"


def tiers(built: Built, disks: list[str]) -> dict[str, str]:
    """Each tier in use with its budget and what it holds now, and the threads beside them."""
    import torch

    ledger = engine_of(built.model).ledger.snapshot()
    computing = torch.get_num_threads()
    held = {
        tier: f"{format_size(budget)} budget, {format_size(ledger.held[tier])} held at the start"
        + (f", in {', '.join(disks)}" if tier == "disk" else "")
        for tier, budget in ledger.budget.items()
    }
    return {**held, "threads": cores.ours().describe(computing)}
