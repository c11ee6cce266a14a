"""Kill a run that checkpoints at each step, at random moments, as often as asked; check what is left each time.

    python benchmarks/kill_loop.py --kills 1000

Each start has its states elsewhere: in memory, or most of them on disk. After each kill the newest committed checkpoint
must verify, and there may be no swap file, no byte in shared memory, no temporary file and at most one unfinished
checkpoint, which the next start removes. Each run that comes to its end must have seen the same losses and norms, and
have the same weights, as one that was never killed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from checkpoint.kill_loop import kill_loop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50, help="steps of the run, each of which saves")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds until a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where; by default a temporary folder")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.folder or Path(temporary)
        counts = kill_loop(place, options.kills, options.steps, options.seed, options.longest)
    print(
        f"{counts['kills']} kills, of which {counts['leftovers']} in the middle of a save; "
        f"{counts['finished'] + 1} runs came to their end, all equal to the bit to one that was never killed; "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
