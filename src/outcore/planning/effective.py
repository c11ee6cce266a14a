"""What a run is set to: by a plan, by its caller, or by default; never by two that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from outcore.errors import UsageError
from outcore.memory.budget import Budget
from outcore.memory.host import PAGE
from outcore.memory.sizes import format_size, parse_size
from outcore.model.policies import Activations, Precision, read_activations
from outcore.optim.optimizer import Optimizer
from outcore.planning.kept import Kept

if TYPE_CHECKING:
    from outcore.planning.plan import Plan

CHUNK = "8MiB"
"""The size of chunks where nobody says another."""


@dataclass(frozen=True)
class Effective:
    """Settings of `outcore.offload`, each decided.

    Attributes:
        free: whether nobody named activations, so that the first batch may decide about them.
    """

    budget: Budget
    precision: Precision
    activations: Activations
    units: Sequence[str] | None
    chunk_bytes: int
    prefetch: bool
    free: bool = False


def effective(
    plan: Plan | None,
    *,
    budget: Budget | None,
    precision: Precision | str | None,
    activations: Activations | str | None,
    units: Sequence[str] | None,
    chunk_size: str | int | None,
    prefetch: bool,
) -> Effective:
    """The settings of a run. With a plan, what is named beside it must be what the plan says.

    Raises:
        UsageError: something contradicts the plan, or can't mean anything.
    """
    if isinstance(precision, str):
        precision = Precision(precision)  # type: ignore[arg-type]  # checked there
    if isinstance(activations, str):
        activations = read_activations(activations)
    chunk_bytes = parse_size(CHUNK if chunk_size is None else chunk_size)
    if chunk_bytes < PAGE:
        raise UsageError(f"chunk_size={chunk_size!r} is less than a page: give at least {PAGE} bytes")
    asked = Effective(
        budget or Budget(),
        precision or Precision(),
        activations or Activations(),
        units,
        chunk_bytes,
        prefetch,
        activations is None,
    )
    if plan is None:
        return asked
    named = {
        "precision": None if precision in (None, plan.precision) else plan.precision,
        "activations": None if activations in (None, plan.activations) else plan.activations,
        "units": None if units is None or tuple(units) == plan.units else plan.units,
        "chunk_size": None if chunk_size is None or chunk_bytes == plan.chunk_bytes else plan.chunk_bytes,
        "prefetch": None if prefetch else True,
    }
    for name, planned in named.items():
        if planned is not None:
            raise UsageError(
                f"{name}={planned!r} is what the plan was made with: leave {name} out, or plan again with another"
            )
    return Effective(
        _budget(plan, asked.budget), plan.precision, plan.activations, plan.units, plan.chunk_bytes, True
    )


def _budget(plan: Plan, asked: Budget) -> Budget:
    """The plan's budget; where it has no directory for the disk, with the one that is named."""
    for tier in ("device", "host"):
        size, planned = getattr(asked, tier), getattr(plan.limits, tier)
        if size is not None and parse_size(size) != planned:
            there = "none" if planned is None else format_size(planned)
            raise UsageError(
                f"the plan's {tier} budget is {there}, and {size!r} contradicts it: leave it out, or plan again with it"
            )
    if not asked.disks():
        if not plan.budget.disks() and plan.outcome.peak.get("disk", 0):
            raise UsageError(
                f"the plan holds {format_size(plan.outcome.peak['disk'])} on a disk, and no directory is named: give "
                "offload(..., plan=plan, budget=Budget(disk=DIR))"
            )
        return plan.budget
    if plan.budget.disks():
        if plan.budget.disks() != asked.disks():
            raise UsageError("the plan names other directories for the disk: leave disk out of the budget")
        return plan.budget
    return replace(plan.budget, disk=asked.disk)


def check_fit(plan: Plan | None, model: nn.Module, optimizer: Optimizer | None, on_host: bool) -> None:
    """Check that a plan is of a model with as many parameters, as many of them trained by an optimizer that keeps the
    same of each, and a machine of this kind.

    Raises:
        UsageError: it is of another.
    """
    if plan is None:
        return
    count = sum(p.numel() for p in model.parameters())
    trained = 0 if optimizer is None else sum(p.numel() for p in optimizer.parameters() if p.requires_grad)
    if (count, trained) != (plan.facts.parameters, plan.facts.trained):
        raise UsageError(
            f"the plan is of a model with {plan.facts.parameters:,} parameters, {plan.facts.trained:,} of them "
            f"trained, and this one has {count:,} and {trained:,}: plan for this model"
        )
    kept = None if optimizer is None else Kept.of(optimizer.rule, plan.precision.dtype)
    if kept is not None and plan.kept not in (None, kept):
        raise UsageError(
            f"the plan is for an optimizer that keeps {plan.kept}, and this one keeps {kept}: plan with this optimizer"
        )
    if (plan.limits.device is None) != on_host:
        kind = "on the CPU" if plan.limits.device is None else "on an accelerator"
        raise UsageError(
            f"the plan computes {kind}, and this run doesn't: choose the device, or plan for this machine"
        )
