"""A training run that can't fit is refused before anything of it has memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outcore.errors import ModelError

if TYPE_CHECKING:
    import torch

    import outcore
    from outcore.cli.settings import Settings
    from outcore.integrations.transformers import Built
    from outcore.trace.profile import Profile


def rehearsed(
    settings: Settings,
    built: Built,
    optimizer: outcore.Optimizer,
    budget: outcore.Budget,
    activations: outcore.Activations,
    device: torch.device,
    plan: outcore.Plan | None,
) -> Profile | None:
    """Trace one step without values, and hold what it needs against the budgets.

    Returns:
        What its activations will take, for the first lap, which nobody measured yet; ``None`` for a model that can't be
        traced, which has to show it in its first step.

    Raises:
        BudgetError: a budget is too small; says what would do.
    """
    import torch

    import outcore
    from outcore.memory.device import free_bytes
    from outcore.planning.outcome import Limits
    from outcore.planning.rehearsal import rehearse

    on_host = device.type == "cpu"
    ids = torch.empty((settings.batch_size, settings.seq_len), dtype=torch.long, device="meta")
    chosen: dict[str, Any] = {} if plan is None else {"chunk_size": plan.chunk_bytes}
    try:
        rehearsal = rehearse(
            built.model,
            optimizer,
            {"input_ids": ids, "labels": ids},
            on_host=on_host,
            precision=outcore.Precision(settings.precision),  # type: ignore[arg-type]
            activations=activations if plan is None else plan.activations,
            accumulate=settings.accumulate,
            **chosen,
        )
    except ModelError:
        return None
    limits = budget.limits(None if on_host else free_bytes(device))
    rehearsal.check(Limits(limits.device, limits.host, sum(disk.nbytes for disk in limits.disk)))
    return rehearsal.activations
