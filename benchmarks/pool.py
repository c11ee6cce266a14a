"""What the pool itself takes for each use of a chunk, by how many chunks there are.

Chunks are a page each and the disk is memory, so nearly all that is timed is the deciding: what leaves, what is read
ahead, what is written behind. Of all chunks three in ten fit on the host; a step is a forward, a backward and the
updates, as AdamW with three chunks of states for each chunk of parameters has them. To be compared with what the disk
takes for a chunk of a real run: 8 MiB at 3 GB/s are 2.8 ms. ::

    python benchmarks/pool.py --sizes 20x10 40x40 80x80 --json pool.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.chunks.chunk import Chunk, Kind
from outcore.chunks.pool import Access, Pool
from outcore.chunks.replacers import Belady
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.host import PAGE, reserve
from outcore.memory.ledger import Ledger
from outcore.trace.clock import Clock
from outcore.trace.schedule import Schedule
from sides.report import machine, table, write_json

STATES, SHARE = 3, 0.3


class Run:
    """A training run without a model.

    Args:
        units: how many.
        each: chunks of parameters of each.
    """

    def __init__(self, units: int, each: int) -> None:
        self.count = units * each * (1 + STATES)
        self.uses = units * each * (2 + 1 + STATES)
        self.ledger, schedule = Ledger(), Schedule()
        self.disk = DiskTier([MemoryFile(name="memory")], ledger=self.ledger, budget=1 << 40)
        room = int(self.count * SHARE) * PAGE
        self.pool = Pool(self.ledger, self.disk, room, schedule, Belady(schedule), working=each * PAGE)
        self._clock = Clock(schedule, self.pool)
        self._parameters = [
            [Chunk(Kind.PARAMETER, f"{u}.{k}", reserve(PAGE)) for k in range(each)] for u in range(units)
        ]
        self._states = [
            [[Chunk(Kind.STATE, f"{u}.{k}.{s}", reserve(PAGE)) for s in range(STATES)] for k in range(each)]
            for u in range(units)
        ]

    def _use(self, key: Any, needs: Sequence[Chunk], access: Access) -> None:
        self._clock.tick(key, needs)
        self.pool.guard(needs, access).close()

    def step(self) -> None:
        self._clock.lap("forward and backward")
        for unit, needs in enumerate(self._parameters):
            self._use(("forward", unit), needs, Access.READ)
        for unit, needs in reversed(list(enumerate(self._parameters))):
            self._use(("backward", unit), needs, Access.READ)
        self._clock.lap("updates")
        for unit, (parameters, states) in enumerate(zip(self._parameters, self._states, strict=True)):
            for k, (parameter, its) in enumerate(zip(parameters, states, strict=True)):
                self._use(("update", unit, k), [parameter, *its], Access.WRITE)

    def close(self) -> None:
        self.pool.close()
        self.disk.close()


def timed(units: int, each: int, steps: int) -> dict[str, Any]:
    """The last of so many steps: the first two find no order on record."""
    run = Run(units, each)
    try:
        for number in range(steps):
            before = dict(run.ledger.snapshot().moved)
            began, busy = time.perf_counter(), time.process_time()
            run.step()
            seconds, processor = time.perf_counter() - began, time.process_time() - busy
            moved = {link: n - before.get(link, 0) for link, n in run.ledger.snapshot().moved.items()}
            print(f"{run.count:,} chunks, step {number + 1}: {seconds:.2f} s", flush=True)
    finally:
        run.close()
    return {
        "chunks": run.count,
        "uses": run.uses,
        "seconds": seconds,
        "processor": processor,
        "read": moved["disk read"] // PAGE,
        "written": moved["disk write"] // PAGE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["20x10", "40x40", "80x80"], help="units x chunks of each"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [[int(number) for number in size.split("x")] for size in options.sizes]
    found = [timed(units, chunks, options.steps) for units, chunks in sizes]
    rows = [
        [
            f"{one['chunks']:,}",
            f"{one['uses']:,}",
            f"{one['read']:,}",
            f"{one['written']:,}",
            f"{one['seconds']:.2f}",
            f"{one['seconds'] / one['uses'] * 1e3:.2f}",
        ]
        for one in found
    ]
    print(table(["chunks", "uses in a step", "read", "written", "seconds", "ms a use"], rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "runs": found})


if __name__ == "__main__":
    main()
