"""The model's own hook: where a lap begins, and what its inputs need before they enter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from outcore.errors import StateError
from outcore.memory.refusal import allocating
from outcore.model.backward import BackwardPass
from outcore.model.trees import change_tensors, tensors_of
from outcore.optim.updates import Updates
from outcore.parallel.ranks import Ranks
from outcore.trace.clock import Clock
from outcore.trace.gauge import Gauge

Before = Callable[[tuple[Any, ...], dict[str, Any], int], None]
"""Takes the arguments of a forward and the elements of its inputs."""

TRAINING = ("forward", True, True)
"""The key of a forward with gradients, of a model in training."""


class Laps:
    """Begins a lap with each outermost forward of the model, on inputs moved and cast to where it computes.

    Args:
        dtype: floating inputs are cast to it, as the parameters were.
        before: told of each forward with gradients, in training, before it begins.
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
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._clock = clock
        self._gauge = gauge
        self._backward = backward
        self._updates = updates
        self._ranks = ranks
        self._before = before
        self._depth = 0
        self._outermost: FrameType | None = None
        self._handles = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def __reduce__(self) -> Any:
        raise StateError(
            "an offloaded model can't be copied or pickled, its parameters are elsewhere: use outcore.weights(model)"
        )

    def abandon(self) -> None:
        """Close what a forward or a backward that raised left open."""
        if not self._is_running():
            self._depth, self._outermost = 0, None
            self._backward.abandon_calls()
        if not self._backward.running:
            self._backward.abandon()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._is_running():
            self._depth, self._outermost = 0, sys._getframe(1)
            self._backward.abandon_calls()
        self._depth += 1
        if self._depth == 1 and not self._backward.running:
            size = sum(tensor.numel() for tensor in tensors_of((args, kwargs)))
            self._backward.reset()  # of a pass that raised
            key = ("forward", torch.is_grad_enabled(), module.training)
            if key == TRAINING:
                self._gauge.end()  # of a lap before, whose meter would see what this computes
                self._before(args, kwargs, size)
            with self._ranks.telling("the beginning of a forward"):
                self._gauge.begin(key, size)
                self._clock.lap((*key, self._updates.outstanding))  # then updates come between the units
        moved: dict[int, torch.Tensor] = {}

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = self._place(tensor)
            return moved[id(tensor)]

        with allocating("the model's inputs"):
            return change_tensors(args, place), change_tensors(kwargs, place)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)  # torch calls this, too, when a pre-hook before ours raised
        if self._depth == 0:
            self._outermost = None
            raised = sys.exc_info()[2]
            failed = raised is not None and raised.tb_frame is sys._getframe(1)
            if not torch.is_grad_enabled() or (failed and not self._backward.running):
                self._gauge.end(whole=not failed)  # no backward will come

    def _is_running(self) -> bool:
        """Whether the outermost forward still runs: one that Ctrl-C ended leaves without calling any hook."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        return frame is not None

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.dtype is dtype and tensor.device == self._device:
            return tensor
        return tensor.to(self._device, dtype)
