"""Random numbers that are drawn once more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class PythonDraws:
    """The state of the random numbers of Python and NumPy, which torch's checkpoint knows nothing of."""

    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> PythonDraws:
        """The present state."""
        return cls(random.getstate(), np.random.get_state())

    def equals(self, other: PythonDraws) -> bool:
        """Whether nothing was drawn between both."""
        ours, theirs = self.numpy, other.numpy
        same = ours[2:] == theirs[2:] and np.array_equal(ours[1], theirs[1])
        return self.python == other.python and bool(same)

    def restore(self) -> None:
        """Draw again what was drawn from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what was drawn from here is drawn again; afterwards all goes on as if nothing had been."""
        later = PythonDraws.now()
        self.restore()
        try:
            yield
        finally:
            later.restore()


@dataclass(frozen=True, eq=False)
class Draws:
    """The state of the random number generators of the host, torch's and others, and of a device.

    Attributes:
        own: of the device; ``None`` where it is the host.
    """

    device: torch.device
    plain: PythonDraws
    host: torch.Tensor
    own: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device, like: Draws | None = None) -> Draws:
        """The present state: ``like`` itself if it is the same, so that states in which nothing was drawn cost
        nothing."""
        module = _generator_of(device)
        own = None if module is None else module.get_rng_state(device)
        found = cls(device, PythonDraws.now(), torch.get_rng_state(), own)
        return like if like is not None and found._equals(like) else found

    def _equals(self, other: Draws) -> bool:
        if not torch.equal(self.host, other.host) or not self.plain.equals(other.plain):
            return False
        return self.own is other.own or (
            self.own is not None and other.own is not None and torch.equal(self.own, other.own)
        )

    def restore(self) -> None:
        """Draw again what was drawn from here."""
        self.plain.restore()
        torch.set_rng_state(self.host)
        module = _generator_of(self.device)
        if module is not None:
            module.set_rng_state(self.own, self.device)


@contextmanager
def draws_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards."""
    before = Draws.now(device)
    try:
        yield
    finally:
        before.restore()


def _generator_of(device: torch.device) -> torch._DeviceModule | None:  # type: ignore[name-defined]
    """The module of a device that has random numbers of its own."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None
