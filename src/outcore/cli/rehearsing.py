"""A training run that can't fit is refused before anything of it has memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.errors import ModelError

if TYPE_CHECKING:
    import torch

    import outcore
    from outcore.cli.settings import Settings
    from outcore.integrations.transformers import Built


def rehearsed(
    settings: Settings,
    built: Built,
    optimizer: outcore.Optimizer,
    budget: outcore.Budget,
    activations: outcore.Activations,
    device: torch.device,
    plan: outcore.Plan | None,
) -> int:
    """Trace one step without values, and hold what it needs against the budgets.

    Returns:
        The bytes that its activations will take, for the first lap, which nobody measured yet; 0 for a model that
        can't be traced, which has to show it in its first step.

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
    chosen = {} if plan is None else {"chunk_size": plan.settings.chunk_bytes}
    try:
        rehearsal = rehearse(
            built.model,
            optimizer,
            {"input_ids": ids, "labels": ids},
            on_host=on_host,
            precision=outcore.Precision(settings.precision),  # type: ignore[arg-type]
            activations=activations if plan is None else plan.settings.activations,
            accumulate=settings.accumulate,
            **chosen,
        )
    except ModelError:
        return 0
    limits = budget.limits(None if on_host else free_bytes(device))
    rehearsal.check(Limits(limits.device, limits.host, sum(disk.nbytes for disk in limits.disk)))
    return rehearsal.activations
