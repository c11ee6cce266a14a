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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from outcore.model.forwards import where_recorded
from outcore.model.unit import Unit

REFUSED = "saved tensor hooks"
"""In what torch.func says where there are hooks for saved tensors."""


class Readers:
    """See [Note: Gradients by another way].

    Args:
        read: told of a unit whose parameters the node that runs is about to read, and of the steps that had changed
            it when the node was made.
    """

    def __init__(self, read: Callable[[Unit, int], None]) -> None:
        self._read = read
        self._places: list[tuple[int, int, Unit]] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def around(self, module: nn.Module, units: Sequence[Unit]) -> Callable[[], None]:
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
            before, draws = len(self._places), None if tried else torch.get_rng_state()
            tried = True
            self._places += [(*place, unit) for unit in units for place in _places(unit)]
            try:
                with self._hooks:
                    return forward(*args, **kwargs)
            except RuntimeError as error:
                if draws is None or REFUSED not in str(error):
                    raise
            finally:
                del self._places[before:]
            fitting = False  # torch.func transforms and hooks exclude each other
            torch.set_rng_state(draws)
            return forward(*args, **kwargs)

        return where_recorded(module, run)

    def _pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Autograd gets an alias: the tensor itself may hold the node that saves it."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # sparse, or wrapped by a transform
            address = 0
        for first, last, unit in self._places:
            if first <= address < last:
                return tensor.detach(), tensor._version, unit, unit.steps
        return tensor.detach(), tensor._version

    def _unpack(self, saved: tuple[Any, ...]) -> torch.Tensor:
        tensor: torch.Tensor = saved[0]
        if tensor._version != saved[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: it "
                f"is at version {tensor._version}; expected version {saved[1]} instead"
            )
        if len(saved) > 2:
            self._read(*saved[2:])
        return tensor


def is_ours(hooks: tuple[Any, Any]) -> bool:
    """Whether hooks for saved tensors are those of a `Readers`."""
    return isinstance(getattr(hooks[0], "__self__", None), Readers)


def _places(unit: Unit) -> list[tuple[int, int]]:
    """Addresses of an open unit's parameters: from, and up to."""
    found = []
    for store in unit.stores:
        storage = next(b.parameter for b in unit.bindings if b.store is store).untyped_storage()
        found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return found
