"""A run under a limit of the kernel's, a tenth above what was planned for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")

SCRIPT = """
import os, sys
import torch
from torch import nn
import outcore
from planning.accuracy import CPU

class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
                                    for _ in range(blocks))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

def loss(output):
    return output.float().square().mean()

def run(width, blocks, budget, chunk, steps):
    with torch.device("meta"):
        model = Model(width, blocks)
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3)
    outcore.offload(model, optimizer, budget=budget, chunk_size=chunk)
    for step in range(steps):
        optimizer.backward(loss(model(torch.ones(8, width))))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    outcore.release(model)

group, disk = sys.argv[1:]
run(64, 2, outcore.Budget(host="64MiB"), "64KiB", 2)   # what is loaded and compiled once is not planned for
budget = outcore.Budget(host="112MiB", disk=disk + ":1GiB")
with torch.device("meta"):
    model = Model(768, 12)
planned = outcore.plan(model, batch={"x": torch.ones(8, 768)}, machine=CPU, budget=budget, loss=loss, micro_batch=8,
                       activations=outcore.Activations("keep"), chunk_size="1MiB").outcome.peak["host"]
assert planned > 24 << 20, planned
# What the process has so far is charged to where it came from.
open(group + "/memory.limit_in_bytes", "w").write(str(planned * 11 // 10))
open(group + "/cgroup.procs", "w").write(str(os.getpid()))
run(768, 12, budget, "1MiB", 3)
print(open(group + "/memory.max_usage_in_bytes").read().strip(), planned)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of one's own, gone afterwards."""
    place = V1 / f"outcore-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        pytest.skip("a memory cgroup (v1) can't be made here")
    try:
        yield place
    finally:
        place.rmdir()


def test_a_run_under_a_limit_survives(group: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(group), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    used, planned = map(int, done.stdout.split())
    assert planned / 2 < used <= planned * 1.1  # it was charged to this group
