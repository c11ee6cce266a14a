"""A run that is killed at any time and started again: what the kill loop starts.

    python tests/checkpoint/killed.py DIR STEPS

Trains, in memory or with most of its states on disk, from the newest checkpoint, saves every step, and writes what it
saw of each step (loss, norm) to ``DIR/seen-N``; at the end a digest of all weights to ``DIR/done``. What it keeps on
disk is in ``DIR/disk``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import outcore


class Small(nn.Module):
    """Three blocks with dropout, small enough that a step takes milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


PLACES = {"memory": ("256MiB", "8MiB"), "disk": ("256KiB", "16KiB"), "small chunks": ("320KiB", "4KiB")}
"""Host budget and chunk size; in the first all fits."""


def run(folder: Path, steps: int, where: str = "memory", keep: int = 3) -> tuple[dict[int, Any], str]:
    """Train to the end; what each step showed, and a digest of the weights."""
    host, chunk_size = PLACES[where]
    (folder / "disk").mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    model = Small()
    optimizer = outcore.AdamW(model.parameters(), lr=1e-2)
    budget = outcore.Budget(host=host, disk=folder / "disk")
    outcore.offload(model, optimizer, budget=budget, chunk_size=chunk_size)
    checkpoints = outcore.Checkpoints(folder / "run", keep=keep)
    torch.manual_seed(2)
    found = checkpoints.restore(model, optimizer)
    seen: dict[int, Any] = {}
    for step in range(found[1]["next"] if found else 0, steps):
        batch = torch.randn(4, 48, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        optimizer.backward(loss)
        seen[step] = [loss.item(), optimizer.clip_grad_norm_(1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, model, optimizer, extra={"next": step + 1})
        place = folder / f"seen-{step}"
        place.with_suffix(".new").write_text(json.dumps(seen[step]))
        os.replace(place.with_suffix(".new"), place)
    hasher = xxhash.xxh3_128()
    for _, value in outcore.weights(model):
        hasher.update(value.numpy().tobytes())
    outcore.release(model)
    return seen, hasher.hexdigest()


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    _, digest = run(folder, steps)
    (folder / "done").write_text(digest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
