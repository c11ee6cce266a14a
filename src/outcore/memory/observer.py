"""Who looks on while a step runs: told when each thing began and ended, and what the tiers hold.

The rooms report to the `Ledger` as they always do, and it passes on what it hears. Nobody reports to an
observer directly, and while there is none a report costs one comparison.
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

Track = Literal[
    "step",
    "forward",
    "backward",
    "read",
    "update",
    "waiting",
    "device waiting",
    "disk read",
    "disk write",
    "device in",
    "device out",
    "wire",
]
"""Where a span belongs: what is computed, who stands still (the training thread, or the device's compute
stream), and the links."""

TRACKS: tuple[Track, ...] = get_args(Track)

Mark = float | torch.Event
"""A moment: seconds, or an event that a device passes when it gets there."""

Where = torch.device | torch.Stream | None
"""Whose time counts: a stream's, that of a device's current stream, or the calling thread's (the CPU too)."""


class Observer(Protocol):
    """Called on any thread, also under the locks of pool, lanes and ledger: it must be short and call none of them."""

    def mark(self, where: Where) -> Mark:
        """The present moment, as ``where`` has it."""

    def span(self, track: Track, name: str, start: Mark, stop: Mark, nbytes: int) -> None:
        """Something is over, or will be when the device passes ``stop``; ``nbytes`` crossed a link, or 0."""

    def level(self, tier: str, kind: str, nbytes: int) -> None:
        """A tier holds this many bytes of a kind from now on."""
