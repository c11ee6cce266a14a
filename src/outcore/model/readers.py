"""Who reads parameters in backward, whatever way gradients took to get there.

[Note: Gradients by another way]
A unit opens in backward when a gradient reaches an output of one of its calls. A tensor may leave a module otherwise:
as an attribute of the module (a loss that balances a router), in an object of the user's, through a hook that collects
features. Nodes behind it would read parameters that have left: zeros, without a word. So what autograd saves while a
unit is open is looked at: an alias of the unit's parameters knows the unit, and opens it when a node asks for it. All
else is handed back as it was. Hooks of others that are at work (a checkpoint, `save_on_cpu`) are not replaced: those
inside of a block win anyway, and those around it are meant to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from outcore.model.draws import Draws
from outcore.model.forwards import where_recorded
from outcore.model.owners import Owners
from outcore.model.unit import Unit
from outcore.model.watched import check

REFUSED = "saved tensor hooks"
"""In what torch.func says where there are hooks for saved tensors."""


class Readers:
    """See [Note: Gradients by another way].

    Args:
        read: told of a unit whose parameters the node that runs is about to read, and of its version when the node
            was made.
        owners: know whose parameters a tensor shows.
        device: what computes.
    """

    def __init__(self, read: Callable[[Unit, int], None], owners: Owners, device: torch.device) -> None:
        self._device = device
        self._read = read
        self._owners = owners
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def around(self, module: nn.Module) -> Callable[[], None]:
        """Watch what is saved in calls of a module, within which units are open.

        Returns:
            A function that undoes it.
        """
        fitting, tried = True, False

        def run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal fitting, tried
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if not fitting or (top is not None and not is_ours(top)):
                return forward(*args, **kwargs)
            draws = None if tried else Draws.now(self._device)
            tried = True
            try:
                with self._hooks:
                    return forward(*args, **kwargs)
            except RuntimeError as error:
                if draws is None or REFUSED not in str(error):
                    raise
            fitting = False  # torch.func transforms and hooks exclude each other
            draws.restore()
            return forward(*args, **kwargs)

        return where_recorded(module, run)

    def here(self) -> AbstractContextManager[Any]:
        """Inside, what is saved outside of calls is watched too, where units are open and graphs are made."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if not torch.is_grad_enabled() or (top is not None and not is_ours(top)):
            return nullcontext()
        return self._hooks

    def _pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Autograd gets an alias: the tensor itself may hold the node that saves it."""
        unit = self._owners.of(tensor)
        if unit is None:
            return tensor.detach(), tensor._version
        return tensor.detach(), tensor._version, unit, unit.version

    def _unpack(self, saved: tuple[Any, ...]) -> torch.Tensor:
        tensor: torch.Tensor = saved[0]
        check(tensor, saved[1])
        if len(saved) > 2:
            self._read(*saved[2:])
        return tensor


def is_ours(hooks: tuple[Any, Any]) -> bool:
    """Whether hooks for saved tensors are those of a `Readers`."""
    return isinstance(getattr(hooks[0], "__self__", None), Readers)
