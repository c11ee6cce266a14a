"""What a computation depends on besides its arguments and random numbers (`outcore.model.draws`): autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


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
