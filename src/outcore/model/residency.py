"""Opening and closing units: the one place where parameters are pointed at memory and away from it.

[Note: Written in place]
An open parameter shows a copy of its master in the precision that computes, on tiers where nobody writes it back. So
what is written there would be lost, or not, as the budget has it. torch counts writes to a tensor, and a unit that
closes with other counts than it opened with says so. What is written through ``.data`` isn't counted.

A closed parameter shows one NaN for all its elements. Most writes to that raise by themselves; those that don't
(another tensor in its place, a constant that fills it) are seen when the unit opens or the next step comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch

from outcore.errors import StateError
from outcore.memory.ledger import Ledger
from outcore.memory.refusal import allocating
from outcore.model.owners import Owners
from outcore.model.saved.seam import Saved
from outcore.model.stage import Stage
from outcore.model.unit import Unit
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
        self._uses: dict[Unit, AbstractContextManager[None]] = {}
        self._views: dict[Unit, Sequence[torch.Tensor]] = {}
        self._staged: set[Unit] = set()
        self._versions: dict[Unit, list[int]] = {}

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
            _refuse_lost(unit)
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
        for binding, tensor in zip(unit.bindings, self._views[unit], strict=True):
            binding.parameter.data = tensor
        self._owners.enter(unit)
        self._versions[unit] = _versions(unit)
        self._uses[unit] = self._ledger.doing(phase, unit.name, self._stage.device)
        self._uses[unit].__enter__()

    def leave(self, *units: Unit) -> None:
        """Undo one `enter` of each.

        Raises:
            StateError: a parameter was written to, see [Note: Written in place]; all are closed then.
        """
        with torch.inference_mode(False), ExitStack() as stack:
            for unit in reversed(units):
                stack.callback(self._leave, unit)

    def _leave(self, unit: Unit) -> None:
        assert unit.opened > 0, unit.name
        unit.opened -= 1
        if unit.opened == 0:
            written = _written(unit, self._versions.pop(unit))
            self._owners.leave(unit)
            for binding in unit.bindings:
                binding.parameter.data = binding.resting
            self._uses.pop(unit).__exit__(None, None, None)
            self._put_down(unit)
            self._gauge.window(("closed", unit.index))
            if written:
                raise StateError(
                    f"{written} was changed in place where its values are only there to be read (clamp_ under no_grad, "
                    "an embedding with max_norm, copy_ in outcore.gather): its master would never know; change it "
                    "between steps, outcore.change(model, function)"
                )

    def _put_down(self, unit: Unit) -> None:
        if unit in self._staged:
            self._staged.remove(unit)
            self._stage.close(unit)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, parameters change: what is open is put down, and taken up again as the step leaves it."""
        held = [unit for unit in self._uses if unit in self._staged]
        for unit in self._views:
            if self._stage.lasting and self._stage.device.type == "cpu" and not unit.opened:
                _refuse_overwritten(unit)
        for unit in held:
            self._put_down(unit)
        try:
            yield
        finally:
            for unit in held:
                self._updates.settle(unit.stores)
                self._stage.open(unit)  # where it was, for addresses are stable
                self._staged.add(unit)


def _versions(unit: Unit) -> list[int]:
    return [binding.parameter._version for binding in unit.bindings]


def _written(unit: Unit, before: list[int]) -> str | None:
    """The first parameter that was written to since; see [Note: Written in place]."""
    pairs = zip(unit.bindings, before, strict=True)
    return next((b.name for b, version in pairs if b.parameter._version != version), None)


def _refuse_lost(unit: Unit) -> None:
    """Raises StateError: a closed unit's parameter was given other values; it is as before then."""
    for binding in unit.bindings:
        if binding.parameter.data_ptr() != binding.resting.data_ptr():
            binding.parameter.data = binding.resting
            raise _lost(binding.name)


def _refuse_overwritten(unit: Unit) -> None:
    """Likewise, where the NaN that it shows was overwritten."""
    for binding in unit.bindings:
        shown = binding.resting
        if shown.numel() and shown.is_floating_point() and not shown.as_strided((), ()).isnan():
            shown.as_strided((), ()).fill_(float("nan"))
            raise _lost(binding.name)


def _lost(name: str) -> StateError:
    return StateError(
        f"{name} was written to while its values were elsewhere (p.data = ..., zero_, nn.init), so nothing became of "
        "it: change it between steps by outcore.change(model, function)"
    )
