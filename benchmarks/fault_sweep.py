"""Let every operation of a training step, a save and a load fail in turn, and check what comes of each.

    python benchmarks/fault_sweep.py [--scenario NAME] [--stride 1]

Each transfer and growth of the swap file, each call to the file system that checkpoints are in, and each allocation
that outcore's own code asks for, fails once and from then on, in each way it can (an error, a full disk, short, nothing
moved, wrong bytes, late, out of memory). A case ends well with a typed error, after which the checkpoint before loads
and the process is as it was, or with the same bits as without the fault. Nothing may hang, stay open or stay pinned.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from sweeping.cases import NAMES, sweep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", choices=NAMES, action="append")
    parser.add_argument("--stride", type=int, default=1, help="take each so-many-th case")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    for name in options.scenario or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            tally = sweep(Path(folder), name, options.stride, told=lambda text: print(text, flush=True))
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common())
        print(f"{name}: {tally.cases} cases in {tally.seconds:.0f} s: {outcomes}", flush=True)
        total += tally.outcomes
    print(f"all: {sum(total.values())} cases, {total['FAULT']} of them not as they must be")
    sys.exit(1 if total["FAULT"] else 0)


if __name__ == "__main__":
    main()
