"""A plan: settings that were found to fit, and what a step with them will take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outcore.memory.budget import Budget
from outcore.model.policies import Activations, Precision
from outcore.planning.kept import Kept
from outcore.planning.machine import Machine
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.settings import said
from outcore.planning.strategies import Row
from outcore.planning.subject import Facts
from outcore.trace.profile import Profile

DAY = 86_400


@dataclass(frozen=True)
class Plan:
    """How to run, and what is to be expected. Printed, it says so in words.

    `outcore.offload` runs it with ``plan=``; the loop gives ``micro_batch`` sequences to each forward and steps after
    ``accumulate`` of them.

    Attributes:
        budget: bytes per tier.
        precision: what to compute in.
        activations: what blocks do with theirs, and in which slices.
        chunk_bytes: the most bytes of parameters that move as one piece.
        micro_batch: sequences of one forward and backward.
        accumulate: forwards and backwards of a step.
        tokens: of a step.
        machine: for which it was made.
        limits: the budgets in bytes.
        least: the smallest budgets with which these settings work.
        facts: of the model.
        flops: operations of matrix products in a step, recomputation included.
        outcome: of the simulated run.
        floor: the least seconds a step can take here: the slowest part alone, with all else hidden behind it.
        bottleneck: what that part is.
        table: the memory of each strategy, per rank.
        ranks: for which the table was made.
        tried: how many settings were simulated.
        units: names of units, as `outcore.offload` takes them.
        profile: what activations take in one pass, window by window.
        kept: what the optimizer that was planned for keeps of each parameter.
    """

    budget: Budget
    precision: Precision
    activations: Activations
    chunk_bytes: int
    micro_batch: int
    accumulate: int
    tokens: int
    machine: Machine = field(repr=False)
    limits: Limits
    least: Limits
    facts: Facts = field(repr=False)
    flops: int
    outcome: Outcome
    floor: float
    bottleneck: str
    table: Sequence[Row] = field(repr=False)
    ranks: int
    tried: int
    units: tuple[str, ...] | None = None
    profile: Profile | None = field(default=None, repr=False)
    kept: Kept | None = field(default=None, repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.outcome.seconds

    @property
    def break_even(self) -> int:
        """Tokens per step from which computing takes as long as the slowest link or the update does now.

        More tokens in larger micro-batches move no more bytes, so this is where a longer step becomes free.
        """
        other = max([*parts(self.outcome, with_compute=False).values(), 0.0])
        return round(other * self.tokens / self.outcome.compute) if self.outcome.compute else 0

    @property
    def written_per_day(self) -> int:
        """Bytes written to the disks in a day of such steps."""
        return round(self.outcome.moved.get("disk write", 0) * DAY / self.outcome.seconds)

    @property
    def disk_years(self) -> float | None:
        """Years until the disks have taken what their maker warrants; ``None`` if nothing is written or known."""
        daily = self.written_per_day
        return self.machine.endurance / daily / 365 if daily and self.machine.endurance else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it: sizes in bytes, times in seconds."""
        limits = {"device": self.limits.device, "host": self.limits.host, "disk": self.limits.disk}
        least = {"device": self.least.device, "host": self.least.host, "disk": self.least.disk}
        out = self.outcome
        return {
            "machine": self.machine.name,
            "model": {
                "parameters": self.facts.parameters,
                "trained": self.facts.trained,
                "shared_names": self.facts.shared,
                "buffer_bytes": self.facts.buffers,
                "units": [
                    {"name": u.name, "parameters": u.parameters, "trained": u.trained}
                    for u in self.facts.units
                ],
            },
            "settings": {
                "budget": limits,
                "precision": self.precision.compute,
                "activations": str(self.activations),
                "microbatch": self.activations.microbatch,
                "loss_slice": self.activations.loss_slice,
                "logits": self.activations.logits,
                "chunk_bytes": self.chunk_bytes,
                "micro_batch": self.micro_batch,
                "accumulate": self.accumulate,
            },
            "least_budget": least,
            "step": {
                "tokens": self.tokens,
                "seconds": out.seconds,
                "tokens_per_second": self.tokens_per_second,
                "flops": self.flops,
                "compute_seconds": out.compute,
                "update_seconds": out.update,
                "waited_seconds": dict(out.waited),
                "busy_seconds": dict(out.busy),
                "moved_bytes": dict(out.moved),
                "floor_seconds": self.floor,
                "bottleneck": self.bottleneck,
                "break_even_tokens": self.break_even,
            },
            "peak_bytes": dict(out.peak),
            "settled_peak_bytes": dict(out.settled),
            "disk_written_per_day": self.written_per_day,
            "disk_years": self.disk_years,
            "ranks": self.ranks,
            "memory_table": [
                {"strategy": row.name, "fits": row.fits, "bytes": {t: dict(k) for t, k in row.tiers.items()}}
                for row in self.table
            ],
            "tried": self.tried,
        }

    def __str__(self) -> str:
        out = self.outcome
        peaks = ", ".join(f"{tier} {nbytes:,} bytes" for tier, nbytes in out.peak.items())
        return (
            f"{self.facts.parameters:,} parameters on {self.machine.name}: {self.micro_batch} sequences x "
            f"{self.accumulate}, activations {said(self.activations)}, {self.precision.compute}; a step of "
            f"{self.tokens:,} tokens takes {out.seconds:.3g} s ({self.tokens_per_second:,.0f} tokens/s), bound by "
            f"{self.bottleneck}; peaks: {peaks}"
        )


def parts(outcome: Outcome, with_compute: bool = True) -> Mapping[str, float]:
    """The seconds that each part of the machine works in a step; disks read and write in turn."""
    found = {"compute": outcome.compute} if with_compute else {}
    found["update"] = outcome.update
    disk = outcome.busy.get("disk read", 0.0) + outcome.busy.get("disk write", 0.0)
    if disk:
        found["disk"] = disk
    for link in ("device in", "device out"):
        if link in outcome.busy:
            found[link] = outcome.busy[link]
    return found
