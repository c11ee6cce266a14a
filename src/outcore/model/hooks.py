"""Hooks at module boundaries: when units open and close, in forward and in backward.

[Note: One call of a module]
In forward a unit is open from the pre-forward to the forward hook (which always runs, also when the module
raises or when a checkpoint stops its recomputation early). In backward it opens when the first gradient reaches one
of the call's outputs, and closes when gradients reach its inputs. Inputs are passed on as views, and it is these
views' graph nodes that tell: autograd runs ready nodes youngest first, so all nodes of the call have run before
the nodes of its inputs. Three cases lack such a node: no input needs a gradient (then the call ends when all
parameters have theirs), an input takes no part (then it ends when the next unit opens after some input
was reached), or neither happens (then it ends with the backward pass).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.model.backward import BackwardPass, Call
from outcore.model.residency import Residency
from outcore.model.trees import change_tensors, tensors_of
from outcore.model.unit import Unit


class PointHooks:
    """The hooks of one module that opens units."""

    def __init__(
        self, module: nn.Module, units: tuple[Unit, ...], residency: Residency, backward: BackwardPass
    ) -> None:
        self._units = units
        self._residency = residency
        self._backward = backward
        self._calls: list[Call | None] = []
        self._handles = [
            module.register_forward_pre_hook(self._pre_forward, with_kwargs=True),
            module.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        entered = []
        try:
            for unit in self._units:
                self._residency.enter(unit, "backward" if self._backward.running else "forward")
                entered.append(unit)
        except BaseException:
            for unit in entered:
                self._residency.leave(unit)
            self._calls.append(None)  # the forward hook is called all the same
            raise
        if not torch.is_grad_enabled():
            self._calls.append(Call(self._units))
            return None
        call = Call(self._units)
        self._calls.append(call)

        views: dict[int, torch.Tensor] = {}

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in views:  # attention asks whether query *is* key
                views[id(tensor)] = self._backward.watch_input(call, tensor)
            return views[id(tensor)]

        return change_tensors(args, watch), change_tensors(kwargs, watch)

    def _post_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        call = self._calls.pop()
        if call is None:
            return
        for unit in self._units:
            self._residency.leave(unit)
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    self._backward.watch_output(call, tensor)
