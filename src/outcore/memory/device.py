"""The device that computes: generic accelerator APIs on an accelerator, nothing to do on the CPU.

Only `torch.accelerator`, `torch.Stream` and `torch.Event` are used, so that CUDA, XPU and any other
backend with streams take the same code. A device that has none is asked to finish instead (`NoStreams`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch

from outcore.errors import UsageError
from outcore.memory import xla
from outcore.memory.refusal import allocating_on_device


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
    if device.type == xla.KIND:
        return xla.find(device)
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
    if device.type == xla.KIND:
        return xla.free_bytes(device)
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == xla.KIND:
        xla.finish()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class Offers:
    """What a kind of device can do, as found by trying.

    Attributes:
        streams: copies run beside what it computes.
        resizing: a tensor's memory can be given back and taken again beneath its aliases.
        storages: tensors lie in storages, with addresses and strides; views share them.
    """

    streams: bool
    resizing: bool
    storages: bool


def offers(device: torch.device) -> Offers:
    """What this device can do.

    Raises:
        DeviceError: it is full.
    """
    with allocating_on_device("a first tensor", 4):
        storage = torch.empty(1, device=device).untyped_storage()
        return Offers(
            _works(lambda: torch.Stream(device)),
            _works(lambda: storage.resize_(0)),
            _works(lambda: torch.empty(1, device=device).untyped_storage().data_ptr()),
        )


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except torch.OutOfMemoryError:  # which tells nothing of what the device can do
        raise
    except (RuntimeError, NotImplementedError):
        return False
    return True


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

    def finish(self) -> None:
        """Wait until the device has done all that it was asked for."""
        finish(self.device)


class NoStreams(Streams):
    """A device that does one thing after the other: what is recorded is over when the call returns.

    So all waits hold by themselves, and nothing runs beside anything else.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._line = _Line()
        self.copy_in = self.copy_out = cast(torch.Stream, self._line)

    @property
    def compute(self) -> torch.Stream:
        return cast(torch.Stream, self._line)

    def record(self, stream: torch.Stream) -> torch.Event:
        self.finish()
        return cast(torch.Event, _OVER)

    def bring(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait until tensors that were made from the host's are on the device."""
        if self.device.type == xla.KIND:
            xla.bring(tensors)


class _Over:
    """What stands for an event where there is none: it has been passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_OVER = _Over()


class _Line:
    """What stands for a stream where there is none."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_event(self, event: _Over) -> None:
        pass
