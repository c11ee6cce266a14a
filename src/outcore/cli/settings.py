"""The flags of ``outcore train``, checked as far as they can be by themselves, and as a command again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outcore.cli import options
from outcore.errors import UsageError
from outcore.report.traced import TRACED

EVERY = 100
"""Steps between two checkpoints."""

KEEP = 2
"""Checkpoints that stay: should the newest turn out to be damaged, there is one before it."""


@dataclass(frozen=True)
class Settings:
    """The flags of ``outcore train``. What needs ``--checkpoint`` is ``None`` where it was not given."""

    model: str
    data: list[str]
    device: str | None
    device_memory: str | None
    host_memory: str | None
    disk: list[str]
    seq_len: int
    batch_size: int
    accumulate: int
    steps: int
    optimizer: str
    lr: float | None
    clip: float
    precision: str
    activations: str | None
    seed: int
    log_dir: Path
    trace_steps: str = TRACED
    microbatch: int | None = None
    plan: str = "none"
    checkpoint: Path | None = None
    every: int | None = None
    keep: int | None = None
    resume: bool = False
    grace: float | None = None
    sharding: str = "parameters"
    split: str = "even"
    sums: str = "backward"
    logits: str = "recompute"

    def __post_init__(self) -> None:
        options.at_least(2, seq_len=self.seq_len)
        options.at_least(1, batch_size=self.batch_size, accumulate=self.accumulate, steps=self.steps)
        options.check_seed(self.seed)
        if self.plan not in ("auto", "none"):
            raise UsageError(f"--plan is auto or none, and is {self.plan!r}")
        if self.split not in ("even", "speed"):
            raise UsageError(f"--split is even or speed, and is {self.split!r}")
        if self.microbatch is not None:
            options.at_least(1, microbatch=self.microbatch)
            ways = [part.rpartition("=")[2] for part in (self.activations or "recompute").split(",")]
            if not all(way.startswith("recompute") for way in ways):
                raise UsageError(
                    "--microbatch works on recomputed blocks: give --activations recompute, or leave it out"
                )
        if self.logits not in ("keep", "recompute"):
            raise UsageError(f"--logits is keep or recompute, and is {self.logits!r}")
        if self.logits == "keep" and self.microbatch is None:
            raise UsageError("--logits keep is for a loss in slices: give --microbatch, or leave it out")
        if self.lr is not None and not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be above 0, and is {self.lr}")
        if not (self.clip >= 0 and math.isfinite(self.clip)):
            raise UsageError(f"--clip must be 0 (off) or more, and is {self.clip}")
        if self.checkpoint is None:
            for name in ("every", "keep", "resume", "grace"):
                if getattr(self, name) not in (None, False):
                    raise UsageError(f"--{name} has no meaning without --checkpoint DIR: give both")
        options.at_least(1, every=EVERY if self.every is None else self.every)
        options.at_least(1, keep=KEEP if self.keep is None else self.keep)
        if self.grace is not None and not (self.grace > 0 and math.isfinite(self.grace)):
            raise UsageError(f"--grace must be above 0 seconds, and is {self.grace}")


def resume_command(settings: Settings, defaults: Mapping[str, Any]) -> str:
    """The command that goes on with a run: its flags that are not the defaults, and ``--resume``.

    Args:
        defaults: of each setting by name.
    """
    words = ["outcore", "train"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name == "resume" or value is None or value in (defaults.get(field.name), []):
            continue
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{field.name.replace('_', '-')}", str(item)]
    return shlex.join([*words, "--resume"])
