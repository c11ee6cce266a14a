"""Computing on the CPU as one of several ranks: parameters are gathered for use, gradients summed over ranks.

What ranks do together is said elsewhere: `outcore.model.summing` says when gradients are summed,
`outcore.model.gathering` when parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outcore.chunks.pool import Pool
from outcore.chunks.store import RunStore
from outcore.memory.place import Place
from outcore.model.gathering import Gathering
from outcore.model.host_frames import HostFrames
from outcore.model.replicas import Replicas
from outcore.model.stage import HostStage, view
from outcore.model.summing import Summing
from outcore.model.unit import Binding, Unit
from outcore.optim.gradients import Gradients


class RankedStage(HostStage):
    """Every rank keeps everything; gradients are summed over ranks. Implements `outcore.model.stage.Stage`.

    Args:
        own: takes what this rank's backward passes leave.
        replicas: what the ranks of this node have in common.
    """

    def __init__(
        self,
        pool: Pool,
        spans: Mapping[RunStore, Place],
        own: Gradients,
        summing: Summing,
        replicas: Replicas,
    ) -> None:
        super().__init__(pool, spans, own)
        self._summing = summing
        self._replicas = replicas

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        super().collect(unit, self._summing.home(binding), gradient)

    def gradients_complete(self, unit: Unit) -> None:
        pass

    def backward_over(self) -> None:
        self._summing.pass_over()

    def settle_gradients(self) -> None:
        self._summing.settle()

    def collected(self) -> set[int]:
        return self._summing.collected()

    def forget_gradients(self) -> None:
        self._summing.forget()

    def shut(self) -> None:
        super().shut()
        self._replicas.shut()


class ShardedStage(RankedStage):
    """Every rank keeps its slice, and parameters are gathered into frames of the host.

    Args:
        keeps: gather parameters once a step, not for each use.
    """

    def __init__(
        self,
        pool: Pool,
        own: Gradients,
        summing: Summing,
        frames: HostFrames,
        gathering: Gathering,
        keeps: bool,
        replicas: Replicas,
    ) -> None:
        super().__init__(pool, {}, own, summing, replicas)
        self._frames = frames
        self._gathering = gathering
        self._keeps = keeps

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return [view(self._frames.flat(b.store), b, b.store.run.first) for b in unit.bindings]

    def open(self, unit: Unit) -> None:
        self._gathering.open(unit)

    def close(self, unit: Unit) -> None:
        if not self._keeps:
            self._gathering.close(unit)

    def stale(self, unit: Unit) -> None:
        if any(store.run.trained for store in unit.stores):
            self._gathering.leave(unit)

    def replaced(self, unit: Unit) -> None:
        self._gathering.leave(unit)

    def shut(self) -> None:
        self._gathering.shut()
        super().shut()
