"""Opening and closing units: the one place where parameters are pointed at memory and away from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch

from outcore.memory.ledger import Ledger
from outcore.memory.refusal import allocating
from outcore.model import closed
from outcore.model.owners import Owners
from outcore.model.saved.seam import Saved
from outcore.model.singles import Singles
from outcore.model.stage import Stage
from outcore.model.unit import Unit
from outcore.model.writes import Writes, refuse_assigned, refuse_filled
from outcore.optim.gradients import Gradients
from outcore.optim.updates import Updates
from outcore.parallel.ranks import Ranks
from outcore.trace.clock import Clock
from outcore.trace.gauge import Gauge

Phase = Literal["forward", "backward", "read"]


class Residency:
    """Counts who needs a unit. Nested and repeated openings are legal."""

    def __init__(
        self,
        stage: Stage,
        clock: Clock,
        gradients: Gradients,
        gauge: Gauge,
        updates: Updates,
        ledger: Ledger,
        ranks: Ranks,
        saved: Saved,
        owners: Owners,
        singles: Singles,
    ) -> None:
        self._stage = stage
        self._gradients = gradients
        self._clock = clock
        self._gauge = gauge
        self._updates = updates
        self._ledger = ledger
        self._ranks = ranks
        self._saved = saved
        self._owners = owners
        self._singles = singles
        self._uses: dict[Unit, AbstractContextManager[None]] = {}
        self._views: dict[Unit, Sequence[torch.Tensor]] = {}
        self._staged: set[Unit] = set()
        self._writes = Writes()

    def heed(self, unit: Unit) -> None:
        """What was written to it outside is its value from now on, and its version says so."""
        if not unit.opened:
            self._singles.take(unit)

    def enter(self, unit: Unit, phase: Phase) -> None:
        """Open a unit: its parameters have their values until the matching `leave`."""
        if torch.is_inference_mode_enabled():  # what is made there could never be trained
            with torch.inference_mode(False):
                self.enter(unit, phase)
            return
        unit.opened += 1  # from here on nobody takes its memory away
        if unit.opened > 1:
            return
        try:
            doing = f"the {phase} of {unit.name}"
            with self._ranks.telling(doing), allocating(doing):
                self._open(unit, phase)
        except BaseException:
            unit.opened -= 1
            raise

    def _open(self, unit: Unit, phase: Phase) -> None:
        if self._stage.lasting:
            refuse_assigned(unit)
        self._singles.take(unit)
        needs = unit.parameter_chunks
        self._saved.sweep()
        if phase == "backward":
            needs += self._saved.expected(unit) + self._gradients.expected(unit.stores)
        self._gauge.window((phase, unit.index))
        self._updates.settle(unit.stores)
        self._clock.tick((phase, unit.index), needs)
        self._stage.open(unit)
        self._staged.add(unit)
        if phase == "backward":
            self._saved.opened(unit)
        if unit not in self._views:
            self._views[unit] = self._stage.views(unit)
        closed.opened(unit)
        for binding, tensor in zip(unit.bindings, self._views[unit], strict=True):
            binding.parameter.data = tensor
        self._owners.enter(unit)
        self._writes.opened(unit)
        self._uses[unit] = self._ledger.doing(phase, unit.name, self._stage.device)
        self._uses[unit].__enter__()

    def leave(self, *units: Unit) -> None:
        """Undo one `enter` of each.

        Raises:
            StateError: a parameter was written to, see `outcore.model.writes`; all are closed then.
        """
        with torch.inference_mode(False), ExitStack() as stack:
            for unit in reversed(units):
                stack.callback(self._leave, unit)

    def _leave(self, unit: Unit) -> None:
        assert unit.opened > 0, unit.name
        unit.opened -= 1
        if unit.opened == 0:
            written = self._writes.written(unit)
            self._owners.leave(unit)
            for binding in unit.bindings:
                binding.parameter.data = binding.resting
            closed.closed(unit)
            self._uses.pop(unit).__exit__(None, None, None)
            self._put_down(unit)
            self._gauge.window(("closed", unit.index))
            if written is not None:
                raise written

    def _put_down(self, unit: Unit) -> None:
        if unit in self._staged:
            self._staged.remove(unit)
            self._stage.close(unit)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, parameters change: what is open is put down, and taken up again as the step leaves it."""
        held = [unit for unit in self._uses if unit in self._staged]
        if self._stage.lasting:
            refuse_filled(self._views, self._singles.has)
        self._singles.take_all()
        for unit in held:
            self._put_down(unit)
        try:
            yield
        finally:
            for unit in held:
                self._updates.settle(unit.stores)
                self._stage.open(unit)  # where it was, for addresses are stable
                self._staged.add(unit)
