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
from outcore.errors import UsageError

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
        """The settings as they are for this rank: the first one alone keeps a log.

        Raises:
            UsageError: the batch can't be divided.
        """
        if settings.batch_size % self.size:
            raise UsageError(
                f"--batch-size counts the sequences of all ranks together: {settings.batch_size} can't be divided "
                f"among {self.size}"
            )
        if self.aside is None:
            return settings
        return replace(settings, log_dir=self.aside, trace_steps="none")

    def rows(self, batch: Any) -> Any:
        """This rank's rows of a batch, shape (batch_size, seq_len)."""
        share = len(batch) // self.size
        return batch[self.rank * share : (self.rank + 1) * share]

    def agreed(self, model: Any, loss: float, stopped: bool) -> tuple[float, bool]:
        """The mean of all ranks' losses, and whether any of them is to stop."""
        from outcore.engine import engine_of

        words = engine_of(model).ranks.words(struct.pack("<d?", loss, stopped), "the end of a step")
        said = [struct.unpack("<d?", word) for word in words]
        return sum(value for value, _ in said) / len(said), any(stop for _, stop in said)


@contextmanager
def launched(device: torch.device) -> Iterator[Launch]:
    """Inside, the ranks that ``torchrun`` started are joined; without it this is the only one.

    Raises:
        UsageError: there are several, and they would compute on an accelerator.
    """
    import torch.distributed as dist

    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        yield Launch()
        return
    if device.type != "cpu":
        raise UsageError(f"several ranks can't compute on {device.type} yet: give --device cpu")
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
