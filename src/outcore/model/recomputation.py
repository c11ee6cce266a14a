"""A call whose backward computes its forward again.

[Note: Arguments]
torch's checkpoint watches the tensors among its own positional arguments, and takes some keywords for itself. So all
tensors of a call, wherever they are in its arguments, are given to it in a row, and the call is put together again from
those that it kept: one that was changed in place meanwhile is an error, as it is in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outcore.model.buffers import CallBuffers, places_of
from outcore.model.draws import PythonDraws
from outcore.model.trees import put_together, take_apart


class Recomputation:
    """Calls a block's forward and keeps its inputs alone.

    Random numbers (dropout) come out the same the second time, those of Python and NumPy too, and so does what it
    changes in buffers (`outcore.model.buffers`).

    Args:
        name: of the block, for messages.
        computing: called before each forward: gradients may come to the block by another way than its outputs.
    """

    def __init__(self, module: nn.Module, name: str, computing: Callable[[], None]) -> None:
        self._places = places_of(module)
        self._name = name
        self._computing = computing

    def buffers(self) -> CallBuffers:
        """Those of one call, which computes more than once."""
        return CallBuffers(self._name, self._places)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives; see [Note: Arguments]."""
        buffers, drawn = self.buffers(), PythonDraws.now()
        skeleton, tensors = take_apart((args, kwargs))
        first = [(args, kwargs)]

        def compute(*kept: torch.Tensor) -> Any:
            self._computing()
            draws: AbstractContextManager[None] = nullcontext() if first else drawn.again()
            positional, named = first.pop() if first else put_together(skeleton, kept)
            with buffers.computing(), draws:
                return forward(*positional, **named)

        return checkpoint(compute, *tensors, use_reentrant=False)
