"""Parameters that one optimizer steps alone.

[Note: One optimizer for a parameter]
The gradients of an offloaded model go to the optimizer that `outcore.offload` was given, and its parameters have no
values between steps. Another optimizer over one of them finds no gradient and steps without doing anything. torch
tells of each step of every optimizer; as long as a model is offloaded that is listened to, and such a step is refused.
A frozen parameter may lie in any optimizer: none would do anything with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from outcore.errors import StateError

_claims: weakref.WeakSet[Claim] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


class Claim:
    """Says whose parameters are stepped by nobody but one optimizer, until it ends or is dropped.

    Args:
        parameters: by their names. Who holds the claim keeps them alive.
        optimizer: the one; ``None`` if they aren't stepped at all.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters}
        self._optimizer = optimizer
        _claims.add(self)
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_refuse))
        weakref.finalize(self, _listen_no_more).atexit = False

    def end(self) -> None:
        _claims.discard(self)
        _listen_no_more()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Raises:
            StateError: an optimizer other than the one has one of the parameters, which isn't frozen.
        """
        if optimizer is self._optimizer:
            return
        for group in optimizer.param_groups:
            if self._names.keys().isdisjoint(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and parameter.requires_grad:
                    raise StateError(
                        f"{type(optimizer).__name__} holds {name}, which belongs to an offloaded model, and would do "
                        "nothing to it: only the optimizer given to outcore.offload(model, optimizer) steps its "
                        "parameters; give it parameter groups for other learning rates, and others alone to this one"
                    )


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for claim in tuple(_claims):
        claim.check(optimizer)


def _listen_no_more() -> None:
    if not tuple(_claims):  # one that is being collected still counts in its length
        while _handles:
            _handles.pop().remove()
