"""``outcore train --plan auto``: settings that don't change the result, chosen by simulating them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    import outcore
    from outcore.cli.settings import Settings
    from outcore.integrations.transformers import Built


def searched(
    settings: Settings,
    built: Built,
    optimizer: outcore.Optimizer,
    budget: outcore.Budget,
    device: torch.device,
) -> outcore.Plan | None:
    """The fastest plan for a run, or ``None`` where none is asked for.

    Chosen are the size of chunks and, unless it is named, whether blocks recompute: both leave every bit of the result
    as it is. The batch stays as it is named, and so does ``--microbatch``.

    Raises:
        UsageError: the machine was not profiled.
        BudgetError: nothing fits; says what would.
    """
    if settings.plan == "none":
        return None
    import torch

    import outcore
    from outcore.memory.budget import DiskPath
    from outcore.memory.device import free_bytes
    from outcore.model.policies import read_activations
    from outcore.planning.this import this

    limits = budget.limits(None if device.type == "cpu" else free_bytes(device))
    places = [DiskPath(disk.path, disk.nbytes) for disk in limits.disk]
    machine = this(places[0].path if places else None, device)
    machine = machine.sized(disk=sum(disk.nbytes for disk in limits.disk))
    if settings.activations or settings.microbatch is not None:
        ways = [settings.activations or "recompute"]
    else:
        ways = ["keep", "recompute"]
    ids = torch.empty((settings.batch_size, settings.seq_len), dtype=torch.long, device="meta")
    return outcore.plan(
        built.model,
        optimizer,
        batch={"input_ids": ids, "labels": ids},
        machine=machine,
        budget=outcore.Budget(device=limits.device, host=limits.host, disk=places or None),
        precision=outcore.Precision(settings.precision),  # type: ignore[arg-type]
        activations=[read_activations(way, settings.microbatch, settings.logits) for way in ways],
        accumulate=settings.accumulate,
        micro_batch=settings.batch_size,
    )
