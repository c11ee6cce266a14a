"""A copy of an offloaded model as its class made it: no values, and nothing of what outcore hung in.

[Note: A copy, not the model]
A step can be traced on the very model only if its forward has no effect but its result. Counters, lists of what was
seen and hooks of the user's are such effects, so the trace runs on a deep copy in which parameters and buffers are on
``meta``. What can't be copied, or has hooks and replaced forwards that are not ours, isn't traced: a copy without them
would be another model. Something in the copy may still lead to the original, past every rule (a function that holds a
block); `Blueprint.apart` sees to it that none of it runs.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from outcore.errors import ModelError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_ABSENT: Any = object()


class Blueprint:
    """Remembers what a model was before hooks and replacements were hung in.

    Args:
        model: as its user made it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {module: dict(vars(module)) for module in model.modules()}
        self._ours: dict[tuple[nn.Module, str], Any] = {}

    def hung(self, names: Collection[str] | None = None) -> None:
        """Something was hung in: attributes that are not what they were are ours.

        Args:
            names: of the attributes that may have changed; all if not given.
        """
        for module, before in self._before.items():
            for name, value in vars(module).items():
                changed = before.get(name, _ABSENT) is not value and (names is None or name in names)
                if changed and (module, name) not in self._ours:
                    self._ours[module, name] = before.get(name, _ABSENT)

    def copied(self) -> tuple[nn.Module, dict[nn.Parameter, nn.Parameter]]:
        """The copy, and its parameters by those of the model.

        Raises:
            ModelError: the model has hooks or forwards of others.
            Exception: whatever a part of the model raises that can't be copied.
        """
        memo: dict[int, Any] = {}
        there = list(self._model.modules())
        for module in there:
            self._check(module)
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    memo[id(value)] = value
                elif "_hooks" in name and isinstance(value, dict):
                    memo[id(value)] = OrderedDict()
        parameters = {}
        for parameter in self._model.parameters():
            blank = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
            )
            parameters[parameter] = memo[id(parameter)] = blank
        for buffer in self._model.buffers():
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
        for module, name in self._ours:
            if name in vars(module):
                memo[id(vars(module)[name])] = _ABSENT
        found = copy.deepcopy(self._model, memo)
        twins = dict(zip(there, found.modules(), strict=True))
        for (module, name), before in self._ours.items():
            own = vars(twins[module])
            if before is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = copy.deepcopy(before, memo)
        return found, parameters

    def _check(self, module: nn.Module) -> None:
        for name in HOOKS:
            for hook in vars(module)[name].values():
                if not type(getattr(hook, "__self__", None)).__module__.startswith("outcore."):
                    raise ModelError("the model has hooks of its own")
        own = vars(module).get("forward", _ABSENT)
        before = self._ours.get((module, "forward"), own)
        if before is not _ABSENT:
            raise ModelError("the forward of a module was replaced")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, no module of the model itself can be called."""
        ours = set(self._model.modules())

        def refuse(module: nn.Module, args: Any) -> None:
            if module in ours:
                raise ModelError("a copy of the model leads back to it")

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()
