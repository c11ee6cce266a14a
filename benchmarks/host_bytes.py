"""Host bytes per parameter with everything on the host: by the ledger, and by what the system counts.

The system's count is the process's proportional set size (PSS), less what it was after a small model had been trained
and released in the same process: interpreter, libraries and compiled kernels. Both are taken where most is held that is
no activation, which is between backward and ``step()``; and when the updates are done. ::

    python benchmarks/host_bytes.py --model gpt2-medium --json host_bytes.json
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore.chunks.chunk import Kind
from outcore.memory.heap import give_back
from outcore.memory.sizes import format_size
from outcore.offloaded import engine_of
from sides.report import machine, table, write_json
from sides.training import Outcore, Settings

KINDS = tuple(kind.value for kind in (Kind.PARAMETER, Kind.STATE, Kind.GRADIENT))


def set_size() -> int:
    """This process's PSS in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system doesn't say")


def train(
    model: str, rows: int, tokens: int, host: str, folder: str, steps: int, look: Callable[[Any, str], None]
) -> None:
    """Steps with everything on the host; ``look`` is called at both moments of the last one."""
    asked = Settings("outcore, host", model, rows, tokens, "cpu", folder, {"host": host}, loss_slice=128)
    run = Outcore(asked, disk=False)
    gc.collect()
    step = run.optimizer.step

    def stepped() -> None:
        if number == steps - 1:
            look(run.model, "before step()")
        step()

    run.optimizer.step = stepped
    for number in range(steps):
        run.step(asked.batch(number))
    engine_of(run.model).settle()
    look(run.model, "updates done")
    outcore.release(run.model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--host", default="12GiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[list[str]] = []
    found: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        train("gpt2-tiny", 1, 32, "64MiB", folder, 2, lambda model, moment: None)
        gc.collect()
        give_back()
        baseline = set_size()

        def look(model: Any, moment: str) -> None:
            give_back()
            pss = set_size() - baseline
            kinds = outcore.snapshot(model).kinds["host"]
            held = {kind: kinds.get(kind, 0) for kind in KINDS}
            count = sum(parameter.numel() for parameter in model.parameters())
            each = [f"{held[kind] / count:.2f}" for kind in KINDS]
            total = sum(held.values()) / count
            rows.append([moment, *each, f"{total:.2f}", f"{pss / count:.2f}"])
            found[moment] = {"parameters": count, "ledger": held, "pss less baseline": pss}

        train(options.model, options.rows, options.tokens, options.host, folder, options.steps, look)
    print(f"{options.model}; before it {format_size(baseline)} of interpreter, libraries and kernels")
    print(table(["bytes per parameter", *KINDS, "by the ledger", "by PSS"], rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "baseline": baseline, **found})


if __name__ == "__main__":
    main()
