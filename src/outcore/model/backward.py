"""One backward pass: which calls are open in it, and when their units' gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd import Variable

from outcore.errors import StateError
from outcore.model.graph import next_sequence_number, nodes_of, own_outputs
from outcore.model.residency import Residency
from outcore.model.unit import Unit


@dataclass(eq=False)
class Call:
    """One call of a module in forward, and its stay in backward.

    Attributes:
        around: the call within which this one happened, if any.
        versions: those of its units when it happened.
        first_node: the number of the first graph node that the call may have made.
        nodes: how many nodes of the call are watched for its end.
        reached: how many of them have run in the current backward pass.
    """

    units: tuple[Unit, ...]
    first_node: int
    around: Call | None
    versions: tuple[int, ...] = field(init=False)
    nodes: int = field(default=0, init=False)
    reached: int = field(default=0, init=False)
    open: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.versions = tuple(unit.version for unit in self.units)


@dataclass(eq=False)
class Reading(Call):
    """A unit that is open for a node to which gradients came by another way than the outputs of a call.

    Attributes:
        node: the last one that reads it, held so that no other is taken for it.
    """

    node: object = None


class BackwardPass:
    """Follows the engine of autograd through one ``backward()`` after the other.

    Attributes:
        calls: the calls that forward is within, outermost first.

    Args:
        residency: opens and closes units.
        complete: called with a unit when no more of its gradients will come from this pass.
        over: called at the end of a pass.
    """

    def __init__(
        self,
        residency: Residency,
        complete: Callable[[Unit], None],
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._residency = residency
        self._complete = complete
        self._over = over
        self._open: dict[Call, None] = {}
        self._awaited: dict[Unit, set[int]] = {}
        self._started = False
        self._number = 0
        self.calls: list[Call] = []

    @property
    def running(self) -> bool:
        """Whether autograd is in the middle of a pass (and not left behind by one that raised)."""
        return self._started and torch._C._current_graph_task_id() != -1

    def abandon_calls(self) -> None:
        """No forward runs: what one that ended without its hooks left open is closed."""
        while self.calls:
            self._residency.leave(*self.calls.pop().units)

    # -- watching ---------------------------------------------------------------------------------

    def watch(self, call: Call, outputs: list[torch.Tensor]) -> None:
        """Open the call's units before the first gradient enters it, close them after its last node.

        Where nodes of the call lead elsewhere than to its outputs, nobody knows which is the last; then units stay open
        until others open.
        """
        made = next_sequence_number() - call.first_node
        outputs = own_outputs(outputs, call.first_node)
        for tensor in outputs:
            tensor.register_hook(lambda _: self._enter(call))
        last, known = nodes_of(outputs, call.first_node)
        for node in last:
            node.register_hook(lambda *_: self._reached(call))
        call.nodes = len(last) if known >= made else len(last) + 1

    # -- events -----------------------------------------------------------------------------------

    def _enter(self, call: Call) -> None:
        _refuse_second_order()
        self.start()
        if call.open:
            return
        for unit, version in zip(call.units, call.versions, strict=True):
            self._residency.heed(unit)
            _refuse_changed(unit, version)
        around = set(_enclosing(call))
        for other in [c for c in self._open if c.reached and c not in around]:
            self._leave(other)  # nodes it waits for are not part of this pass
        for unit in call.units:
            self._await(unit)
            self._residency.enter(unit, "backward")
        call.open, call.reached = True, 0
        self._open[call] = None

    def read(self, unit: Unit, version: int) -> None:
        """The node that runs is about to read parameters of a unit: see to it that they are there.

        What is opened here stays until another unit opens: nodes run in the reverse of the order in which they were
        made, so those of one call follow each other.

        Args:
            version: of the unit when the node was made.

        Raises:
            StateError: no backward runs, or its graph would be kept, or they were changed since.
        """
        self._residency.heed(unit)
        _refuse_changed(unit, version)
        running = torch._C._current_graph_task_id() != -1
        if unit.opened and not (running and any(isinstance(call, Reading) for call in self._open)):
            return
        if not running:
            raise StateError(
                f"what autograd saved of the parameters of {unit.name} is not there outside of a backward"
            )
        node = torch._C._current_autograd_node()
        for other in [call for call in self._open if isinstance(call, Reading)]:
            if unit in other.units:
                other.node = node
            elif other.node is not node:
                self._leave(other)
        if unit.opened:
            return
        _refuse_second_order()
        self.start()
        self._await(unit)
        self._residency.enter(unit, "backward")
        call = Reading((unit,), 0, None, node=node)
        call.open, call.reached = True, 1
        self._open[call] = None

    def computing(self, units: Sequence[Unit]) -> None:
        """A checkpoint within a call of these units computes, for the first time or again: the units are to be open."""
        if torch._C._current_graph_task_id() != -1:
            with torch.no_grad():
                for unit in units:
                    self.read(unit, unit.version)

    def start(self) -> int:
        """A pass runs: see to it that its end is noticed. Returns a number that no other pass has."""
        if not self._started:
            self._started = True
            self._number += 1
            Variable._execution_engine.queue_callback(self.reset)
        return self._number

    def _await(self, unit: Unit) -> None:
        if unit not in self._awaited:
            self._awaited[unit] = {b.slot.index for b in unit.bindings if b.parameter.requires_grad}

    def _reached(self, call: Call) -> None:
        call.reached += 1
        if call.open and call.reached >= call.nodes:
            self._leave(call)

    def accumulated(self, unit: Unit, index: int) -> None:
        """A parameter of the unit has its gradient."""
        self.start()
        self._await(unit)
        awaited = self._awaited[unit]
        awaited.discard(index)
        if not awaited:
            self._complete(unit)

    def _leave(self, call: Call) -> None:
        call.open = False
        del self._open[call]
        self._residency.leave(*call.units)

    def abandon(self) -> None:
        """Close what is still open, and take no interest in its gradients."""
        for call in list(self._open):
            self._leave(call)
        self._awaited.clear()
        self._started = False

    def reset(self) -> None:
        """Close what is still open: the end of a pass, or the rest of one that raised."""
        for call in list(self._open):
            self._leave(call)
        for unit, awaited in self._awaited.items():
            if awaited:
                self._complete(unit)
        self._awaited.clear()
        if self._started:
            self._started = False
            self._over()


def _refuse_changed(unit: Unit, version: int) -> None:
    if unit.version != version:
        raise StateError(
            f"{unit.name} was changed since this forward, by an optimizer step or outcore.change: backward would mix "
            "its old activations with new parameters; call backward() before, or the model again"
        )


def _refuse_second_order() -> None:
    if torch.is_grad_enabled():
        raise StateError(
            "backward with create_graph=True isn't possible on an offloaded model: the graph it makes would read "
            "parameters that have left by then"
        )


def _enclosing(call: Call) -> Iterator[Call]:
    while call.around is not None:
        call = call.around
        yield call
