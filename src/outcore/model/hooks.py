"""Hooks at module boundaries: when units open and close, in forward and in backward.

[Note: One call of a module]
In forward a unit is open from the pre-forward to the forward hook (which always runs, also when the module
raises or when a checkpoint stops its recomputation early). In backward it opens when the first gradient
reaches one of the call's outputs, and closes when all graph nodes of the call have run;
`outcore.model.graph` finds those that run last. Nothing is put into the graph: an extra node would change
the order in which gradients of a tensor with several consumers are summed, and with it the last bits. Nodes
that a backward does not reach are not waited for: then the call ends when the next unit opens, or with the
backward pass.

[Note: What backward does not read]
The gradient of an embedding needs the indices, not the weight. Where opening a unit costs a gather over ranks, backward
does not open it for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.errors import ModelError
from outcore.memory.refusal import allocating
from outcore.model.backward import BackwardPass, Call
from outcore.model.closed import copied
from outcore.model.graph import next_sequence_number
from outcore.model.residency import Residency
from outcore.model.trees import change_everywhere, tensors_of
from outcore.model.unit import Unit


class PointHooks:
    """The hooks of one module that opens units.

    Args:
        sparing: see [Note: What backward does not read].
    """

    def __init__(
        self,
        module: nn.Module,
        units: tuple[Unit, ...],
        residency: Residency,
        backward: BackwardPass,
        sparing: bool = False,
    ) -> None:
        self._read_in_backward = not (sparing and type(module) is nn.Embedding)
        self._units = units
        self._residency = residency
        self._backward = backward
        self._calls: list[Call | None] = []
        self._handles = [
            module.register_forward_pre_hook(self._pre_forward, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> Any:
        raise copied()

    @allocating("a call of a module")
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._backward.calls:
            self._calls.clear()  # of forwards that were abandoned
        entered = []
        try:
            for unit in self._units:
                self._residency.enter(unit, "backward" if self._backward.running else "forward")
                entered.append(unit)
            first_node = next_sequence_number()
        except BaseException:
            self._residency.leave(*entered)
            self._calls.append(None)  # the forward hook is called all the same
            raise
        calls = self._backward.calls
        call = Call(self._units, first_node, calls[-1] if calls else None)
        self._calls.append(call)
        calls.append(call)

    @allocating("a call of a module")
    def _post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        call = self._calls.pop() if self._calls else None
        if call is None:  # torch calls this, too, when a pre-hook before ours raised
            return None
        self._backward.calls.remove(call)
        try:
            output = self._own(output)
        finally:
            self._residency.leave(*self._units)
        if torch.is_grad_enabled() and self._read_in_backward:
            self._backward.watch(call, [tensor for tensor in tensors_of(output) if tensor.requires_grad])
        return output

    def _own(self, output: Any) -> Any:
        """The output, with views of the parameters copied: what they show is about to leave."""
        shown = {_storage(b.parameter) for unit in self._units for b in unit.bindings}
        if shown.isdisjoint(map(_storage, tensors_of(output))):
            return output
        own = change_everywhere(
            output, lambda tensor: tensor.clone() if _storage(tensor) in shown else tensor
        )
        if not shown.isdisjoint(map(_storage, tensors_of(own))):
            raise ModelError(
                f"{self._units[-1].name} gives a view of its parameters in a {type(output).__name__}, which can't be "
                "rebuilt, and the parameters are about to leave: give back a copy, view.clone()"
            )
        return own


def _storage(tensor: torch.Tensor) -> int:
    """Which storage a tensor shows; a number of its own for one that shows nothing."""
    dense = tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return int(tensor.untyped_storage()._cdata) if dense and tensor.numel() else -id(tensor)
