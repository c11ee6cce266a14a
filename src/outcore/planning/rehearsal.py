"""rehearse(): what a run will need on each tier, for a given batch, in seconds and without bytes.

For whoever knows the batch before the first step, and would rather be refused now than by the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from outcore.errors import BudgetError, ModelError
from outcore.memory.sizes import format_size, parse_size
from outcore.model.policies import Activations, Precision
from outcore.optim.kernels import AdamRule, Rule
from outcore.planning.least import Least, least, said, shortage
from outcore.planning.minimum import check, needs
from outcore.planning.outcome import Limits
from outcore.planning.subject import Loss, Subject, Trains
from outcore.trace.profile import Profile


@dataclass(frozen=True)
class _Ruled:
    """A rule, and a model of which everything is trained that isn't frozen."""

    rule: Rule
    model: nn.Module

    def parameters(self) -> Iterable[nn.Parameter]:
        return (p for p in self.model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Rehearsal:
    """What training a model on a batch needs.

    Attributes:
        least: the smallest budgets with which it works, in bytes: of the device (``None`` where the host computes), of
            the host, and of the disk beside that host budget.
        states: bytes of all parameters, states and gradients.
        activations: bytes of activations and temporaries where the model computes, window by window.
        whole: the most bytes on host and disk together.
    """

    least: Limits
    states: int
    activations: Profile
    whole: int
    _subject: Subject = field(repr=False)
    _asked: _Asked = field(repr=False)

    def check(self, limits: Limits) -> None:
        """Refuse budgets that are too small, before anything has any memory.

        Args:
            limits: bytes per tier; ``Limits(None if the host computes else device, host, sum of disks)``.

        Raises:
            BudgetError: the tier that is short, the bytes it needs, and as ``remedy`` the smallest budgets that would
                do and the nearest change (recompute, smaller slices, a smaller batch, more disk). It is never raised
                for a run that would have worked. A run whose gauge knows ``activations`` works with the least, as
                ``outcore train`` does; one that has to measure its first step may be refused by it within 10 %.
        """
        units, points = self._subject.layout(self._asked.chunk_bytes)
        check(needs(units, points, self._asked.sliced), limits.host, limits.disk, limits.device)
        short = shortage(self.least, self.whole, limits)
        if short is None:
            return
        tier, needed, there = short
        remedy = f"the smallest budgets that would do for this batch are {said(self.least)}"
        for change in self._changes(limits):
            remedy += f"; or {change}"
        raise BudgetError(tier, needed, there, remedy)

    def fits(self, limits: Limits) -> bool:
        """Whether budgets hold the step, for whoever has other settings to try."""
        return shortage(self.least, self.whole, limits) is None

    def _changes(self, limits: Limits) -> Iterator[str]:
        """Single changes that make it fit, the gentlest first; the first of each kind."""
        asked, rows = self._asked.activations, self._subject.batch_size
        if asked.logits == "keep" and self._fits(rows, replace(asked, logits="recompute"), limits):
            yield 'multiply logits again (logits="recompute")'
            return
        if asked.blocks == "keep" and self._fits(rows, Activations("recompute"), limits):
            yield "recompute activations"
            return
        below = limits.disk > 0 or not self._asked.on_host
        if below and asked.blocks in ("keep", "recompute"):
            way: Any = "offload" if asked.blocks == "keep" else "recompute+offload"
            if self._fits(rows, replace(asked, blocks=way), limits):
                yield f"offload activations ({way})"
                return
        size = asked.microbatch or rows
        while size > 1:
            size = max(d for d in range(1, size) if rows % d == 0)
            if self._fits(rows, Activations("recompute", size, asked.loss_slice, asked.units), limits):
                yield f"recompute in slices of {size} (microbatch)"
                break
        size = rows
        while size > 1:
            size //= 2
            if self._fits(size, asked, limits):
                yield f"use batches of {size}"
                break
        short = self.whole - limits.host - limits.disk
        if self.least.host <= limits.host and (self.least.device or 0) <= (limits.device or 0) and short > 0:
            yield f"add {format_size(short)} of disk"

    def _fits(self, rows: int, activations: Activations, limits: Limits) -> bool:
        asked = replace(self._asked, activations=activations)
        try:
            found = asked.least(self._subject, rows)
        except ModelError:  # blocks that can't run in slices
            return False
        return shortage(found.limits, found.whole, limits) is None


@dataclass(frozen=True)
class _Asked:
    """Settings of a run."""

    activations: Activations
    chunk_bytes: int
    on_host: bool
    accumulate: int

    @property
    def sliced(self) -> bool:
        return self.activations.microbatch is not None

    def least(self, subject: Subject, rows: int) -> Least:
        units, points = subject.layout(self.chunk_bytes)
        trace = subject.trace(rows, self.activations)
        return least(units, points, trace, subject.occupied, self.on_host, self.accumulate)


def rehearse(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Trains | Rule | None,
    batch: Mapping[str, Any],
    *,
    on_host: bool,
    precision: Precision | None = None,
    activations: Activations | None = None,
    chunk_size: str | int = "8MiB",
    accumulate: int = 1,
    units: Sequence[str] | None = None,
    loss: Loss | None = None,
) -> Rehearsal:
    """Trace one step without values and say what it needs. A 1.3B model takes one to five seconds and no memory to
    speak of; see `outcore.planning.fake_step`.

    ::

        ids = torch.empty((batch_size, seq_len), dtype=torch.long, device="meta")
        rehearse(model, optimizer, {"input_ids": ids, "labels": ids}, on_host=True).check(Limits(None, host, disk))

    Args:
        model: any module, also on ``meta``, which is left as it is; or a function that makes one, which is called
            with ``meta`` as the default device.
        optimizer: one of outcore's made from the model's parameters, or the rule of one (then everything is trained
            that isn't frozen); AdamW if ``None``.
        batch: keyword arguments of one call of the model. Of its tensors only shapes and dtypes matter.
        on_host: whether the CPU computes; otherwise an accelerator does.
        precision: as `outcore.offload` takes it, and so the following.
        accumulate: forwards and backwards of a step.
        loss: from the model's output to a scalar; by default its ``loss``, or the mean of its first tensor.

    Raises:
        ModelError: the model can't be divided or traced, or its blocks can't run in slices.
        UsageError: the batch has no tensor, or a size can't be read.
    """
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    trains = (
        optimizer if isinstance(optimizer, Trains) else _Ruled(optimizer or AdamRule(decoupled=True), model)
    )
    subject = Subject(model, trains, batch, loss, precision, units, on_host)
    asked = _Asked(activations or Activations(), parse_size(chunk_size), on_host, accumulate)
    low = asked.least(subject, subject.batch_size)
    laid, points = subject.layout(asked.chunk_bytes)
    return Rehearsal(
        low.limits,
        needs(laid, points, asked.sliced).total,
        subject.trace(subject.batch_size, asked.activations).profile(),
        low.whole,
        subject,
        asked,
    )
