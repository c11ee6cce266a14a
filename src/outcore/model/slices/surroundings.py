"""What a computation depends on besides its arguments: random numbers and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draws:
    """The state of the random number generators of the host and of a device.

    Attributes:
        own: of the device; ``None`` where it is the host.
    """

    device: torch.device
    host: torch.Tensor
    own: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device, like: Draws | None = None) -> Draws:
        """The present state: ``like`` itself if it is the same, so that states in which nothing was drawn cost
        nothing."""
        module = _generator_of(device)
        found = cls(device, torch.get_rng_state(), None if module is None else module.get_rng_state(device))
        return like if like is not None and found._equals(like) else found

    def _equals(self, other: Draws) -> bool:
        if not torch.equal(self.host, other.host):
            return False
        return self.own is other.own or (
            self.own is not None and other.own is not None and torch.equal(self.own, other.own)
        )

    def restore(self) -> None:
        """Draw again what was drawn from here."""
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


@dataclass(frozen=True)
class Autocast:
    """The state of autocast on the host and on a device, as it was, but for its cache of cast weights: that would carry
    parts of one slice's graph into the next."""

    settings: tuple[tuple[str, torch.dtype, bool], ...]

    @classmethod
    def now(cls, device: torch.device) -> Autocast:
        kinds = [
            kind for kind in dict.fromkeys(("cpu", device.type)) if torch.amp.is_autocast_available(kind)
        ]
        return cls(tuple((k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, autocast is as it was."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


def _generator_of(device: torch.device) -> torch._DeviceModule | None:  # type: ignore[name-defined]
    """The module of a device that has random numbers of its own."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "get_rng_state") else None
