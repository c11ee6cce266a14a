"""Where a value that is inf or NaN comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import rng
from outcore.model.trees import tensors_of
from outcore.offloaded import engine_of


@torch.no_grad()
def first_nonfinite(model: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    """The first unit whose output is inf or NaN when the model is called with this input.

    Watching each output of each step would cost a pass over all activations. So it is asked afterwards: when a loss is
    not finite, the step is skipped and the weights are what they were, and this calls the model once more, without
    gradients. Random numbers and buffers are put back as they were before.

    Args:
        model: offloaded.
        args, kwargs: what the model is called with.

    Returns:
        The unit's name, or ``None`` if the outputs of all units are finite.

    Raises:
        StateError: the model is not offloaded.
    """
    engine = engine_of(model)
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            values = (tensor for tensor in tensors_of(output) if tensor.is_floating_point())
            if not found and not all(bool(tensor.isfinite().all()) for tensor in values):
                found.append(name)

        return look

    handles = [
        point.module.register_forward_hook(watch(point.name or "the model itself")) for point in engine.points
    ]
    random = rng.capture()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
        rng.restore(random)
    return found[0] if found else None
