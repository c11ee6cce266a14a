"""XLA devices: the one place that knows `torch_xla`, which is asked for only where somebody computes on one.

[Note: What XLA has, and what not]
An XLA device collects operators and runs them when it is told to, as one compiled graph: what is read on the host, or
a `torch_xla.sync()`, which runs all that is pending. It has no streams, its storages have no address and no size that
can be changed, and a view is a tensor of its own once it was computed. What is taken there from the host is copied at
once, so the host may change it afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import psutil
import torch

from outcore.errors import UsageError

KIND = "xla"
"""The type of such devices."""


def find(device: torch.device) -> torch.device:
    """The device with its index filled in.

    Raises:
        UsageError: there is no such device here.
    """
    if find_spec("torch_xla") is None:
        raise UsageError("an XLA device needs torch_xla, which is not installed here")
    import torch_xla

    try:
        count = int(torch_xla.device_count())
        if device.index is not None and device.index >= count:
            raise UsageError(f"there is no device {device}: this machine has {count} of them")
        found = torch.device(torch_xla.device(device.index))
    except RuntimeError as error:
        raise UsageError(f"there is no XLA device here: {str(error).splitlines()[0]}") from None
    _register()
    return found


def free_bytes(device: torch.device) -> int:
    """Bytes that the device has free; where it doesn't say (the CPU as an XLA device), half of what the host has."""
    import torch_xla.core.xla_model as xm

    try:
        said = xm.get_memory_info(device)
        return int(said["bytes_limit"]) - int(said["bytes_used"])
    except (RuntimeError, KeyError):
        return int(psutil.virtual_memory().available) // 2


def finish() -> None:
    """Run all that is pending, and wait for it."""
    import torch_xla

    torch_xla.sync(wait=True)


def bring(tensors: Sequence[torch.Tensor]) -> None:
    """Wait until the values of these tensors are on their device. Nothing else that is pending runs."""
    import torch_xla

    devices = sorted({str(tensor.device) for tensor in tensors})
    torch_xla._XLAC._xla_sync_multi(list(tensors), devices, wait=True, sync_xla_data=False)


def _register() -> None:
    """Let torch find the device's random numbers, as a checkpoint in a model does; whoever came first stays."""
    if not hasattr(torch, KIND):
        torch._register_device_module(KIND, _DeviceModule("torch.xla"))


class _DeviceModule(ModuleType):
    """What torch asks of a device's module."""

    _initialized = True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return int(sys.modules["torch_xla"].device_count())

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """The seed of the next random number, its 64 bits as shape [8], uint8."""
        import torch_xla.core.xla_model as xm

        seed = int(xm.get_rng_state(_name(device))) % (1 << 64)
        return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), _name(device))


def _name(device: Any) -> str | None:
    """A device as `torch_xla` names it; ``None`` for the current one."""
    if device is None or (isinstance(device, torch.device) and device.index is None):
        return None
    return f"{KIND}:{device}" if isinstance(device, int) else str(device)
