"""The device that computes: generic accelerator APIs on an accelerator, nothing to do on the CPU.

Only `torch.accelerator`, `torch.Stream` and `torch.Event` are used, so that CUDA, XPU and any other
backend with streams take the same code.
"""

from __future__ import annotations

import torch

from outcore.errors import UsageError


def find(name: str | torch.device | None) -> torch.device:
    """The device that is meant by ``name``; by default the accelerator if there is one, else the CPU.

    Raises:
        UsageError: there is no such device here.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None or name == "auto":
        return torch.device("cpu") if accelerator is None else current(accelerator)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {str(name)!r}; use 'cpu' or a device such as 'cuda'") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        here = "only the CPU" if accelerator is None else f"the CPU and {accelerator.type}"
        raise UsageError(f"there is no {device.type} device here: this machine has {here}")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise UsageError(
            f"there is no device {device}: this machine has {torch.accelerator.device_count()} of them"
        )
    return current(device)


def current(device: torch.device) -> torch.device:
    """The device with its index filled in."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.device(device.type, index)


def free_bytes(device: torch.device) -> int:
    """Bytes an accelerator has free for this process, as its driver says."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


class Streams:
    """The two copy streams beside the compute stream; they live as long as the engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copy_in = torch.Stream(device)
        self.copy_out = torch.Stream(device)

    @property
    def compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """An event at the present end of a stream."""
        event = torch.Event(self.device)
        event.record(stream)
        return event
