"""What autograd saves of parameters, where their tensors are other ones each time their unit opens.

[Note: Saved parameters]
Autograd saves a parameter itself, and so sees it as it is when backward asks; but of a view of one (the transpose in a
linear layer) it saves a tensor that would keep the values of its forward alive, and their memory. So what is saved
within the model's forward and is a view of one of its parameters is replaced by a way to make it again from the
parameter, which is open when backward asks. Hooks of a checkpoint within the model come first: what it saves goes with
its block.

A storage that has a size and strides gives the view by these. Others (XLA) have no strides that mean anything; there
torch keeps, with each view, how it was made, and a twin of the view that holds no values keeps that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from outcore.model.forwards import where_recorded
from outcore.model.watched import Watched
from outcore.trace.meter import uncounted


class _Saved(Protocol):
    """What autograd holds in place of a tensor."""

    def tensor(self) -> torch.Tensor:
        """The tensor."""


class _Strides:
    """A view of a parameter, or all of it."""

    def __init__(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        self._parameter = parameter
        self._layout = view.size(), view.stride(), view.storage_offset()

    def tensor(self) -> torch.Tensor:
        return self._parameter.detach().as_strided(*self._layout)


class _All:
    """All of a parameter."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter

    def tensor(self) -> torch.Tensor:
        return self._parameter.detach()


class _Twin:
    """A view of a parameter, made again as it was made.

    Args:
        nothing: an empty tensor of the device.
    """

    def __init__(self, parameter: torch.Tensor, view: Any, nothing: torch.Tensor) -> None:
        self._parameter = parameter
        with torch.no_grad():
            self._twin: Any = view._view_func_unsafe(parameter)
        self._twin.data = nothing

    def tensor(self) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self._twin._view_func_unsafe(self._parameter.detach())
        return found


class _Kept:
    """A tensor that is no parameter's. Autograd gets an alias: the tensor itself may hold the node that saves it.

    Args:
        nothing: as above: it stands for the values in what counts the tensor's versions.
    """

    def __init__(self, tensor: torch.Tensor, nothing: torch.Tensor) -> None:
        self._tensor = tensor.data
        probe = tensor.detach()
        probe.data = nothing
        self._watched = Watched(probe)

    def tensor(self) -> torch.Tensor:
        """
        Raises:
            RuntimeError: it was changed in place since.
        """
        self._watched.check()
        return self._tensor


class Aliases:
    """See [Note: Saved parameters].

    Args:
        parameters: of the model, whatever they hold now.
        device: where they are while they are open.
        strided: tensors there have storages and strides.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, strided: bool) -> None:
        self._parameters = set(parameters)
        self._device = device
        self._strided = strided
        self._nothing = torch.empty(0, device=device)

    def around(self, model: nn.Module) -> Callable[[], None]:
        """Watch what is saved in a model's forward.

        Returns:
            A function that undoes it.
        """

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)

        return where_recorded(model, run)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.device != self._device:
            return _Kept(tensor, torch.empty(0, device=tensor.device))
        base = tensor if tensor._base is None else tensor._base
        with uncounted():
            if base not in self._parameters:
                return _Kept(tensor, self._nothing)
            if tensor is base:
                return _All(base)
            if self._strided:
                return _Strides(base, tensor)
            return _Twin(base, tensor, self._nothing)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        with uncounted():
            return saved.tensor()
