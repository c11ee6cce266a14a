"""What an offloaded model can't do, or not at that moment, and the words in which it is refused.

Whatever would end in wrong numbers without a word is refused: values that are not there, gradients that nobody takes or
that come at the wrong time, parameters that become others behind the engine's back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from outcore.errors import StateError
from outcore.model.closed import directly, used_outside
from outcore.model.unit import Binding, Unit
from outcore.optim.optimizer import Optimizer


class Misuse:
    """Refuses it, for one offloaded model."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer | None) -> None:
        self._units = units
        self._optimizer = optimizer
        self._frozen: list[Binding] = []
        self._resting: dict[int, str] = {}
        self._dropped = False

    # -- the model --------------------------------------------------------------------------------

    def hang(self, model: nn.Module) -> list[Callable[[], None]]:
        """Refuse from now on what is called on the model or a part of it; what is returned takes that back."""
        undo = []
        for part in model.modules():
            undo.append(part.register_state_dict_pre_hook(self._refuse_state_dict).remove)
            undo.append(part.register_load_state_dict_pre_hook(self._refuse_loading).remove)
        if self._optimizer is not None:
            self._frozen = [b for u in self._units for b in u.bindings if not b.parameter.requires_grad]
            undo.append(model.register_forward_pre_hook(self._refuse_thawed).remove)
        return undo

    def _refuse_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if any(unit.opened == 0 for unit in self._units):
            raise StateError(
                "an offloaded model's state_dict() would hold no values: use outcore.gather(model) around it, "
                "or outcore.weights(model), which yields one parameter at a time"
            )

    def _refuse_loading(self, module: nn.Module, *args: Any) -> None:
        raise StateError(
            "load_state_dict() can't reach an offloaded model's parameters: load them before offload(), or give "
            "offload(..., weights=directory)"
        )

    def _refuse_thawed(self, module: nn.Module, args: Any) -> None:
        with directly():
            name = next((b.name for b in self._frozen if b.parameter.requires_grad), None)
        if name is not None:
            raise StateError(
                f"{name} was frozen when the model was offloaded and has no place for a gradient: set requires_grad "
                "before offload()"
            )

    def rests(self, binding: Binding) -> None:
        """A parameter has no values while its unit is closed: `refuse_resting` knows it by what it reads as then."""
        self._resting[binding.resting.untyped_storage()._cdata] = binding.name

    def refuse_resting(self, storage: int) -> None:
        """Called with the storage of what an operator reads outside of all units."""
        name = self._resting.get(storage)
        if name is not None:
            raise used_outside(name)

    def refuse_changing(self, in_backward: bool) -> None:
        """Before all parameters are changed."""
        if in_backward or any(unit.opened for unit in self._units):
            raise StateError("parameters can't be changed within a forward, a backward or outcore.gather")

    # -- gradients --------------------------------------------------------------------------------

    def refuse_unscaled(self) -> None:
        """As a gradient comes: it must be that of a scaled loss where fp16 asks for it."""
        optimizer = self._optimizer
        if optimizer is not None and optimizer.loss_scale is not None and not optimizer.scaling:
            raise StateError(
                "loss.backward() doesn't scale the loss, and the gradients of fp16 are taken for scaled ones: call "
                "optimizer.backward(loss) in its place"
            )

    def refuse_clipped(self, binding: Binding) -> None:
        """As a parameter's gradient comes: those it would be added to may not be clipped yet."""
        if self._optimizer is not None and self._optimizer.clipped:
            raise StateError(
                f"the gradients of this step were clipped, and {binding.name} has another one: clip once a step, after "
                "its last backward"
            )

    def refuse_set(self) -> None:
        """Before a step: no gradient may be where this step would not see it."""
        with directly():
            found = (b.name for u in self._units for b in u.bindings if b.parameter.grad is not None)
            name = next(found, None)
        if name is not None:
            raise StateError(
                f"{name}.grad was set by hand, or the parameter was frozen when the model was offloaded: this step "
                "would not use it, for gradients are taken as backward() gives them; set it to None"
            )

    def warn_dropped(self, binding: Binding) -> None:
        """Say once that there are gradients that nobody takes."""
        if not self._dropped:
            self._dropped = True
            warnings.warn(
                f"{binding.name} has a gradient that nobody takes: its optimizer was not given to offload(), which "
                "drops the gradients of all such parameters. If they are not to be trained, set requires_grad=False",
                RuntimeWarning,
                stacklevel=3,
            )
