"""What users may decide about ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from outcore.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

States = Literal["parameters", "gradients", "optimizer", "none"]

Sums = Literal["backward", "step"]

TIMEOUT = 300.0
"""Seconds after which a rank that does not come is given up. One that dies is noticed at once."""


@dataclass(frozen=True)
class Sharding:
    """How states are spread over the ranks of ``torch.distributed`` (Rajbhandari et al. 2020, "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models").

    Attributes:
        states: what a rank keeps only its slice of between uses. ``"parameters"`` (ZeRO-3): of everything;
            parameters are gathered for each use. ``"gradients"`` (ZeRO-2): of gradients and the optimizer's
            states; parameters are gathered once a step. ``"optimizer"`` (ZeRO-1): the same, but the gradients of
            a backward pass stay whole until it is over. ``"none"``: of nothing (data parallel).
        mesh: the ranks, one-dimensional; or two-dimensional, to shard along its last dimension and replicate along
            its first (hybrid). ``None``: all ranks of the default group.
        timeout: seconds after which a rank that does not come is given up.
        sums: when gradients are summed over ranks. ``"backward"``: those of each backward pass. ``"step"``: once a
            step, after each rank summed those of its own passes, as ``no_sync`` does elsewhere: they cross the wire
            once however many passes there are, and each rank keeps its own whole until then. All ways of sharding
            have the same bits for the same ``sums``; the two differ in the last bits if a step has several passes.

    Raises:
        UsageError: a setting that can't mean anything.
    """

    states: States = "parameters"
    mesh: DeviceMesh | None = None
    timeout: float = TIMEOUT
    sums: Sums = "backward"

    def __post_init__(self) -> None:
        if self.states not in get_args(States):
            known = ", ".join(map(repr, get_args(States)))
            raise UsageError(f"unknown sharding {self.states!r}; choose from {known}")
        if self.sums not in get_args(Sums):
            raise UsageError(f"unknown sums {self.sums!r}; choose from 'backward' and 'step'")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise UsageError(f"timeout must be a positive number of seconds, and is {self.timeout!r}")
        if self.mesh is not None and self.mesh.ndim not in (1, 2):
            raise UsageError(f"a mesh has one or two dimensions here, not {self.mesh.ndim}")
