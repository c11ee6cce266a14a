"""The states of random number generators: torch's on the CPU and on each accelerator, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from outcore.errors import CheckpointError

_REFUSED = (RuntimeError, TypeError, ValueError, OverflowError, KeyError, IndexError)


def capture() -> dict[str, Any]:
    """All states, in plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
    }
    if torch.accelerator.is_available():
        kind, module = _accelerator()
        if hasattr(module, "get_rng_state"):
            count = torch.accelerator.device_count()
            states["devices"] = {
                "type": kind,
                "states": [module.get_rng_state(i).cpu() for i in range(count)],
            }
    return states


def check(states: Any) -> None:
    """Try all states on generators of no consequence.

    Raises:
        CheckpointError: one of them is none.
    """
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        for state in states.get("devices", {"states": []})["states"]:
            if state.dtype is not torch.uint8:
                raise TypeError("a device's state must be bytes")
    except (*_REFUSED, AttributeError) as error:
        raise CheckpointError(f"the checkpoint's random number states can't be used: {error}") from None


def restore(states: Any) -> None:
    """Set all states; those of accelerators where there are accelerators of that kind."""
    check(states)
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    devices = states.get("devices")
    if devices is None or not torch.accelerator.is_available():
        return
    kind, module = _accelerator()
    if devices.get("type") != kind or not hasattr(module, "set_rng_state"):
        return
    try:
        for index in range(min(torch.accelerator.device_count(), len(devices["states"]))):
            module.set_rng_state(devices["states"][index], index)
    except _REFUSED as error:
        raise CheckpointError(f"a state of {kind}'s random numbers can't be used: {error}") from None


def _accelerator() -> tuple[str, Any]:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type, torch.get_device_module(device)
