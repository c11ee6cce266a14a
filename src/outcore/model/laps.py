"""Where a lap begins: with each outermost forward of the model, or of a part of it.

[Note: Parts]
A model may be used through its submodules: an encoder, then a decoder, then backward; an evaluation of one of them. So
the outermost call of any module that leads to units begins a lap, named after it, unless it goes on with one: what ran
before, on the model or a part of it, has a graph whose backward hasn't come. Whether that graph is still there says
what hangs on its nodes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn

from outcore.memory.refusal import allocating, allocating_on_device
from outcore.model.backward import BackwardPass
from outcore.model.closed import copied
from outcore.model.trees import change_tensors, tensors_of
from outcore.model.turns import Turn
from outcore.model.units import Point
from outcore.optim.updates import Updates
from outcore.parallel.ranks import Ranks
from outcore.trace.clock import Clock
from outcore.trace.extents import Extents, extents_of
from outcore.trace.gauge import Gauge

Before = Callable[[tuple[Any, ...], dict[str, Any], Extents], None]
"""Takes the arguments of a forward and the shapes of its inputs."""

TRAINING = ("forward", True, True)
"""The key of a forward with gradients, of a model in training."""


class _Awaited:
    """A backward that may come: hangs on the graph of a forward, and goes with it."""

    over = False

    def reached(self, *gradients: Any) -> None:
        self.over = True


class Laps:
    """Begins a lap with each outermost forward; the model's own inputs are moved and cast to where it computes.

    See [Note: Parts].

    Args:
        dtype: floating inputs are cast to it, as the parameters were.
        before: told of each forward of the model with gradients, in training, before it begins.
        points: what opens units; the modules on the way to them are parts.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        clock: Clock,
        gauge: Gauge,
        backward: BackwardPass,
        updates: Updates,
        ranks: Ranks,
        before: Before,
        points: Iterable[Point] = (),
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._clock = clock
        self._gauge = gauge
        self._backward = backward
        self._updates = updates
        self._ranks = ranks
        self._before = before
        self._turn = Turn(lambda: clock.count)
        self._began = False
        self._awaited: weakref.ref[_Awaited] | None = None
        self._parts = _parts(model, points)
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for part in self._parts:
            self._handles += [
                part.register_forward_pre_hook(self._enter_part, with_kwargs=True, prepend=True),
                part.register_forward_hook(self._leave, always_call=True),
            ]

    def __reduce__(self) -> Any:
        raise copied()

    def abandon(self) -> None:
        """Close what a forward or a backward that raised left open."""
        if not self._turn.is_held():
            self._turn.drop()
            self._backward.abandon_calls()
        if not self._backward.running:
            self._backward.abandon()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        frame = sys._getframe(1)
        if not self._turn.is_within(frame):
            self._take_turn(frame)
            if not self._backward.running:
                self._began = True
                self._begin(("forward", torch.is_grad_enabled(), module.training), args, kwargs)
        moved: dict[int, torch.Tensor] = {}

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = self._place(tensor)
            return moved[id(tensor)]

        with allocating("the model's inputs"):
            return change_tensors(args, place), change_tensors(kwargs, place)

    def _enter_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = sys._getframe(1)
        if torch._C._current_graph_task_id() != -1 or self._turn.is_within(frame):
            return  # backward computes it again, or what it is a part of runs
        self._take_turn(frame)
        if self._expected() is None:
            self._began = True
            name = self._parts[module]
            self._begin(("forward", name, torch.is_grad_enabled(), module.training), args, kwargs)

    def _take_turn(self, frame: FrameType) -> None:
        self._turn.take(frame)
        self._began = False
        self._backward.abandon_calls()

    def _begin(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = extents_of(tensors_of((args, kwargs)))
        self._backward.reset()  # of a pass that raised
        self._awaited = None
        if key == TRAINING:
            self._gauge.end()  # of a lap before, whose meter would see what this computes
            self._before(args, kwargs, inputs)
        with self._ranks.telling("the beginning of a forward"):
            self._gauge.begin(key, inputs)
            self._clock.lap((*key, self._updates.outstanding))  # then updates come between the units

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        frame = sys._getframe(1)
        if not self._turn.give(frame):  # torch calls this, too, when a pre-hook before ours raised
            return
        raised = sys.exc_info()[2]
        if raised is not None and raised.tb_frame is frame:
            if torch._C._current_graph_task_id() == -1:
                self._awaited = None
                self._gauge.end(whole=False)
        elif not (torch.is_grad_enabled() and self._await(module, output)) and self._began:
            self._gauge.end()  # no backward will come

    def _expected(self) -> _Awaited | None:
        """The backward that is to come, if one is."""
        awaited = None if self._awaited is None else self._awaited()
        return None if awaited is None or awaited.over else awaited

    def _await(self, module: nn.Module, output: Any) -> bool:
        """Expect a backward from what was computed. Returns whether there may be one."""
        found = list(tensors_of(output))
        nodes = [tensor.grad_fn for tensor in found if tensor.grad_fn is not None]
        awaited = self._expected() or _Awaited()
        for node in nodes:
            node.register_prehook(awaited.reached)
        if nodes:
            self._awaited = weakref.ref(awaited)
        return bool(nodes) or not found or module not in self._parts  # what isn't seen may have a graph

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.dtype is dtype and tensor.device == self._device:
            return tensor
        with allocating_on_device("the model's inputs", tensor.numel() * dtype.itemsize):
            return tensor.to(self._device, dtype)


def _parts(model: nn.Module, points: Iterable[Point]) -> dict[nn.Module, str]:
    """The modules that open units, those on the way to them, and their names; without the model itself."""
    leading = {""}
    for point in points:
        steps = point.name.split(".")
        leading.update(".".join(steps[:end]) for end in range(1, len(steps) + 1))
    return {module: name for name, module in model.named_modules() if name and name in leading}
