"""One backward pass: which calls are open in it, and when their units' gradients are complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd import Variable

from outcore.model.residency import Residency
from outcore.model.unit import Unit


@dataclass(eq=False)
class Call:
    """One call of a module in forward, and its stay in backward.

    Attributes:
        inputs: inputs that gradients flow to.
        reached: how many of them have their gradient in the current backward pass.
    """

    units: tuple[Unit, ...]
    inputs: int = 0
    reached: int = 0
    open: bool = field(default=False, init=False)


class BackwardPass:
    """Follows the engine of autograd through one ``backward()`` after the other.

    Args:
        residency: opens and closes units.
        complete: called with a unit when no more of its gradients will come from this pass.
        finished: called at the end of each pass.
    """

    def __init__(
        self, residency: Residency, complete: Callable[[Unit], None], finished: Callable[[], None]
    ) -> None:
        self._residency = residency
        self._complete = complete
        self._finished = finished
        self._open: dict[Call, None] = {}
        self._awaited: dict[Unit, set[int]] = {}
        self._started = False

    @property
    def running(self) -> bool:
        """Whether autograd is in the middle of a pass (and not left behind by one that raised)."""
        return self._started and torch._C._current_graph_task_id() != -1

    # -- watching ---------------------------------------------------------------------------------

    def watch_input(self, call: Call, tensor: torch.Tensor) -> torch.Tensor:
        """A view of an input whose graph node tells when the call's backward is over."""
        passed = tensor.view_as(tensor)
        node = passed.grad_fn
        if node is not None:
            call.inputs += 1
            node.register_hook(lambda *_: self._reached(call))
        return passed

    def watch_output(self, call: Call, tensor: torch.Tensor) -> None:
        """Open the call's units before the first gradient enters it."""
        tensor.register_hook(lambda _: self._enter(call))

    # -- events -----------------------------------------------------------------------------------

    def _enter(self, call: Call) -> None:
        self._start()
        if call.open:
            return
        for other in [c for c in self._open if c.reached]:
            self._leave(other)
        for unit in call.units:
            self._await(unit)
            self._residency.enter(unit, "backward")
        call.open, call.reached = True, 0
        self._open[call] = None

    def _start(self) -> None:
        if not self._started:
            self._started = True
            Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def _await(self, unit: Unit) -> None:
        if unit not in self._awaited:
            self._awaited[unit] = {b.slot.index for b in unit.bindings if b.parameter.requires_grad}

    def _reached(self, call: Call) -> None:
        call.reached += 1
        if call.open and call.reached >= call.inputs:
            self._leave(call)

    def accumulated(self, unit: Unit, index: int) -> None:
        """A parameter of the unit has its gradient."""
        self._start()
        self._await(unit)
        awaited = self._awaited[unit]
        awaited.discard(index)
        if awaited:
            return
        self._complete(unit)
        for call in [c for c in self._open if c.inputs == 0 and unit in c.units]:
            if all(not self._awaited[other] for other in call.units):
                self._leave(call)

    def _leave(self, call: Call) -> None:
        call.open = False
        del self._open[call]
        for unit in call.units:
            self._residency.leave(unit)

    def _end(self) -> None:
        self.reset()
        self._finished()

    def reset(self) -> None:
        """Close what is still open: the end of a pass, or the rest of one that raised."""
        for call in list(self._open):
            self._leave(call)
        for unit, awaited in self._awaited.items():
            if awaited:
                self._complete(unit)
        self._awaited.clear()
        self._started = False
