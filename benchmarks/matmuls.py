"""Matrix products in bf16 on this processor: torch's own, widened to fp32, and in fp32. ::

    python benchmarks/matmuls.py --json matmuls.json

The shapes are those of GPT-2 124M with 1,024 tokens: operands as they are (NN), the second transposed (NT, a forward of
``nn.Linear``), the first transposed (TN, gradients of weights).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

import outcore
from outcore.model.matmuls import slow_dtypes
from sides.report import machine, table, write_json

SHAPES = [(1024, 768, 2304), (1024, 3072, 768), (3072, 1024, 768), (128, 768, 50257)]


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The least of so many times."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def speeds(shape: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """GFLOP/s by which operand is transposed."""
    rows, depth, columns = shape
    a, b = torch.randn(rows, depth, dtype=dtype), torch.randn(depth, columns, dtype=dtype)
    turned_a, turned_b = a.t().contiguous().t(), b.t().contiguous().t()
    work = 2 * rows * depth * columns / 1e9
    return {
        "NN": work / seconds(lambda: a @ b, rounds),
        "NT": work / seconds(lambda: a @ turned_b, rounds),
        "TN": work / seconds(lambda: turned_a @ b, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in slow_dtypes())
    print(f"without instructions: {names or 'none'}; {torch.get_num_threads()} threads")
    rows, found = [], []
    for shape in SHAPES:
        outcore.widen_matmuls(False)
        plain = speeds(shape, torch.bfloat16, options.rounds)
        fp32 = speeds(shape, torch.float32, options.rounds)
        outcore.widen_matmuls()
        ours = speeds(shape, torch.bfloat16, options.rounds)
        outcore.widen_matmuls(False)
        found.append({"shape": shape, "torch": plain, "widened": ours, "fp32": fp32})
        rows += [
            [" x ".join(map(str, shape)), way, *(f"{side[way]:.1f}" for side in (plain, ours, fp32))]
            for way in plain
        ]
    print(table(["shape", "operands", "bf16 by torch", "bf16 widened", "fp32"], rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "products": found})


if __name__ == "__main__":
    main()
