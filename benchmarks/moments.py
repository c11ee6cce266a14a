"""Training with moments in fp32, bf16 and 8 bits, side by side: losses, and bytes of states.

A small GPT-2 on bytes of the standard library's sources, the same batches and first weights for all, with dropout off.
The three differ by rounding of the moments alone; a second seed shows how much another order of the data does. ::

    python benchmarks/moments.py --steps 600 --json moments.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore.optim.kernels import Master

KEPT = ("fp32", "bf16", "8bit")
TOKENS = 128


def sources(nbytes: int) -> torch.Tensor:
    """Bytes of the modules beside ``textwrap``, by name, shape [nbytes]."""
    import textwrap

    found = bytearray()
    for path in sorted(Path(textwrap.__file__).parent.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= nbytes:
            break
    return torch.frombuffer(found, dtype=torch.uint8)[:nbytes].long()


def train(kept: str, seed: int, steps: int, rows: int, data: torch.Tensor) -> dict[str, Any]:
    """Losses of one run, shape [steps], the bytes of its states per parameter, and its processor time."""
    import transformers

    torch.manual_seed(0)
    none = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_layer=4,
        n_embd=192,
        n_head=6,
        n_positions=TOKENS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **none,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = outcore.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, moments=kept)  # type: ignore[arg-type]
    outcore.offload(model, optimizer, budget=outcore.Budget(host="2GiB"), device="cpu")
    order = torch.Generator().manual_seed(seed)
    losses, began = [], time.process_time()
    for step in range(steps):
        rate = 1e-3 * min(1.0, (step + 1) / 50)
        optimizer.param_groups[0]["lr"] = rate
        at = torch.randint(0, data.numel() - TOKENS, (rows,), generator=order)
        ids = data[at[:, None] + torch.arange(TOKENS)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    processor = time.process_time() - began
    planes = optimizer.rule.planes(torch.bfloat16, Master.SPLIT)
    outcore.release(model)
    nbytes = sum(plane.nbytes(1 << 20) for plane in planes) / (1 << 20) + 2
    return {
        "kept": kept,
        "seed": seed,
        "parameters": count,
        "bytes": nbytes,
        "processor": processor,
        "losses": losses,
    }


def table(runs: list[dict[str, Any]], steps: int) -> str:
    """Means of the last losses before each sixth of the run."""
    ends = [steps * k // 6 for k in range(1, 7)]
    lines = ["| moments | seed | bytes | " + " | ".join(f"step {end}" for end in ends) + " |"]
    lines.append("| --- |" + " --- |" * (len(ends) + 2))
    for run in runs:
        means = [statistics.mean(run["losses"][max(0, end - 25) : end]) for end in ends]
        shown = " | ".join(f"{mean:.4f}" for mean in means)
        lines.append(f"| {run['kept']} | {run['seed']} | {run['bytes']:.2f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = sources(4 << 20)
    runs = []
    for seed in options.seeds:
        for kept in KEPT:
            runs.append(train(kept, seed, options.steps, options.rows, data))
            print(f"{kept}, seed {seed}: {runs[-1]['losses'][-1]:.4f}", flush=True)
    print(table(runs, options.steps))
    if options.json:
        options.json.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
