"""``outcore train`` under ``torchrun``: joined by the environment that it sets, told by the first rank alone."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outcore.cli.settings import Settings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Launch:
    """This rank among those that ``torchrun`` started.

    Attributes:
        rank: its number.
        size: how many there are.
        aside: where a rank that keeps no log puts what would be in it; gone when the ranks part.
    """

    rank: int = 0
    size: int = 1
    aside: Path | None = None

    def settings(self, settings: Settings) -> Settings:
        """The settings as they are for this rank: the first one alone keeps a log."""
        if self.aside is None:
            return settings
        return replace(settings, log_dir=self.aside, trace_steps="none")

    def agreed(self, model: Any, loss: float, stopped: bool) -> tuple[float, bool]:
        """The mean of all ranks' losses, each weighed by its rows, and whether any of them is to stop."""
        from outcore.offloaded import engine_of

        words = engine_of(model).ranks.words(struct.pack("<d?", loss, stopped), "the end of a step")
        said = [struct.unpack("<d?", word) for word in words]
        return sum(value for value, _ in said) / len(said), any(stop for _, stop in said)


@contextmanager
def launched(device: torch.device) -> Iterator[Launch]:
    """Inside, the ranks that ``torchrun`` started are joined; without it this is the only one.

    Of several accelerators in a machine each rank takes one, by its number there.
    """
    import torch
    import torch.distributed as dist

    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        yield Launch()
        return
    if device.type != "cpu":
        number = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(number % torch.accelerator.device_count())
    from torch.distributed.rendezvous import rendezvous

    from outcore.parallel.lives import own_store

    store, rank, _ = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=own_store(store, rank, size), rank=rank, world_size=size)
    try:
        if dist.get_rank() == 0:
            yield Launch(0, size)
        else:
            with tempfile.TemporaryDirectory(prefix="outcore-rank-") as aside:
                yield Launch(dist.get_rank(), size, Path(aside))
    finally:
        with suppress(Exception):  # one that lost its connections has said so already
            dist.destroy_process_group()
