"""Taking a model's memory away: parameters and buffers change where they live, not who they are."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import ModelError
from outcore.memory.refusal import allocating_on_device


def replace_data(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Point a parameter at other memory, of any device and dtype. It stays the same object."""
    try:
        parameter.data = tensor
    except RuntimeError:  # the backends differ: exchange what is behind the two objects
        other = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


def move_buffers(model: nn.Module, device: torch.device) -> int:
    """Move all buffers to the device that computes; their dtypes stay.

    Returns:
        Their bytes.

    Raises:
        ModelError: a buffer is on ``meta`` and so has no value to move.
        DeviceError: the device has no memory for one.
    """
    total = 0
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ModelError(
                    f"the buffer {module_name}.{name} is on 'meta' and has no value: build the model so that "
                    "buffers are real (outcore.integrations.transformers does), or give it one"
                )
            nbytes = buffer.numel() * buffer.element_size()
            with allocating_on_device(f"the buffer {module_name}.{name}", nbytes):
                module._buffers[name] = buffer.to(device)
            total += nbytes
    return total


def wants_fp32(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that must stay fp32: batch norms', whose kernels want the dtype of their statistics."""
    return {
        p
        for m in model.modules()
        if isinstance(m, _BatchNorm)
        for p in m.parameters()
        if p.dtype is torch.float32
    }
