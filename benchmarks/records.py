"""Published single-device records on paper: does outcore's plan fit the same machine, and how fast would it be?

Prints the table of docs/records.md, or puts it there. All rows take three to five minutes on one core.

    python benchmarks/records.py [--only WORD] [--page docs/records.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import outcore
from outcore.errors import BudgetError
from outcore.integrations.transformers import empty
from outcore.planning.machine import DESCRIBED, GIB, TB, Machine

FLOPS_PER_PARAMETER = 8
"""What a token costs with recomputation (Narayanan et al. 2021): papers that state FLOP/s count it so. Turned the
other way it gives the tokens per second that a published figure means."""

# NVIDIA V100 data sheet (SXM3, 32 GB): 900 GB/s, 125 TFLOP/s in fp16 tensor cores, 15.7 in fp32. It has no bf16: plans
# for it are in fp16. PCIe 3.0 x16, 12.5 of 15.75 GB/s; a DGX-2 has 1.5 TB of DRAM (12 channels of DDR4-2666).
V100 = Machine(
    name="V100-32GB in a DGX-2",
    device=32 * GIB,
    host=1536 * 10**9,
    disk=30 * TB,
    flops={"fp16": 125e12, "fp32": 15.7e12},
    reached=0.6,
    compute_bandwidth=900e9,
    host_bandwidth=180e9,
    link_in=12.5e9,
    link_out=12.5e9,
    disk_read=25e9,
    disk_write=20e9,
    update=108e9,
    overhead=5e-6,
)


def box(name: str, host: int, disk: int, disks: int = 1, title: str = "") -> Machine:
    """A described accelerator in another machine; several disks work side by side."""
    machine = DESCRIBED[name].sized(host=host, disk=disk)
    return replace(
        machine,
        name=title or machine.name,
        disk_read=machine.disk_read * disks,
        disk_write=machine.disk_write * disks,
    )


def gpt(layers: int, width: int, heads: int, positions: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=positions,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )


def llama(layers: int, width: int, heads: int, shared: int, inner: int, words: int, positions: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=inner,
        vocab_size=words,
        max_position_embeddings=positions,
    )


@dataclass(frozen=True)
class Record:
    """One published claim.

    Attributes:
        system: whose.
        claim: in its authors' words, shortened.
        config: the model.
        batch: sequences of a step; micro-batches are searched for.
        length: tokens of each.
        machine: as far as the paper describes it.
        tflops: published TFLOP/s, 0 if it has none.
        tokens: published tokens per second, 0 if it has none.
        assumed: what the claim leaves open and is assumed here.
    """

    system: str
    claim: str
    config: Callable[[], Any]
    batch: int
    length: int
    machine: Machine
    tflops: float = 0
    tokens: float = 0
    precision: str = "bf16"
    assumed: str = ""


# NVIDIA GeForce RTX 4070 Ti SUPER (Ada, 66 of the RTX 4080's 76 multiprocessors, 2.61 GHz): 16 GB at 672 GB/s, 88
# TFLOP/s in bf16 with fp32 sums, 44 in fp32. Two channels of DDR4-3200 beside it.
TI = Machine(
    name="4070 Ti SUPER + DDR4",
    device=16 * GIB,
    host=64 * GIB,
    disk=0,
    flops={"bf16": 88e12, "fp32": 44e12},
    reached=0.6,
    compute_bandwidth=672e9,
    host_bandwidth=40e9,
    link_in=25e9,
    link_out=25e9,
    disk_read=0,
    disk_write=0,
    update=24e9,
    overhead=5e-6,
)

GH200 = DESCRIBED["gh200"].sized(disk=0)
RECORDS = [
    Record(
        "ZeRO-Offload",
        "10B on one V100-32GB at 40 TFLOPS",
        lambda: gpt(50, 4096, 32, 1024),
        32,
        1024,
        V100.sized(disk=0),
        tflops=40,
        precision="fp16",
        assumed="batch 32",
    ),
    Record(
        "ZeRO-Offload",
        "13B on one V100-32GB",
        lambda: gpt(65, 4096, 32, 1024),
        16,
        1024,
        V100.sized(disk=0),
        precision="fp16",
        assumed="batch 16",
    ),
    Record(
        "ZeRO-3 Offload",
        "40B on one V100-32GB + 1.5 TB",
        lambda: gpt(50, 8192, 64, 1024),
        16,
        1024,
        V100.sized(disk=0),
        precision="fp16",
        assumed="batch 16",
    ),
    Record(
        "Fuyou",
        "13B on one 4090 at 156 TFLOPS",
        lambda: gpt(40, 5120, 40, 1024),
        64,
        1024,
        box("rtx4090", 768 * GIB, 46 * TB, 12, "4090 + 768 GiB + 12 disks"),
        tflops=156,
        assumed="batch 64",
    ),
    Record(
        "Fuyou, LoHan",
        "175B on one 4090 + 256 GB",
        lambda: gpt(96, 12288, 96, 1024),
        32,
        1024,
        box("rtx4090", 256 * GIB, 46 * TB, 12, "4090 + 256 GiB + 12 disks"),
        assumed="batch 32, 12 disks",
    ),
    Record(
        "SuperOffload",
        "25B on one GH200",
        lambda: llama(60, 5888, 46, 46, 15872, 32000, 2048),
        8,
        2048,
        GH200,
        assumed="Llama shape, batch 8",
    ),
    Record(
        "SuperOffload",
        "Qwen3-14B on one GH200 at up to 600 TFLOPS",
        lambda: llama(40, 5120, 40, 8, 17408, 151936, 4096),
        16,
        4096,
        GH200,
        tflops=600,
        assumed="batch 16, 4096 tokens",
    ),
    Record(
        "MegaTrain",
        "120B on one H200 + 1.5 TB",
        lambda: llama(88, 10752, 84, 12, 32256, 128256, 1024),
        32,
        1024,
        box("h200", 1536 * GIB, 0, title="H200 + 1.5 TiB"),
        assumed="Llama shape, batch 32",
    ),
    Record(
        "MegaTrain",
        "7B with a context of 512k on one GH200",
        lambda: llama(32, 4096, 32, 8, 14336, 32000, 1 << 19),
        1,
        1 << 19,
        GH200,
        assumed="Llama shape",
    ),
    Record(
        "GreedySnake",
        "65B on one A100, 1.96 x ZeRO-Infinity",
        lambda: llama(80, 8192, 64, 64, 22016, 32000, 2048),
        32,
        2048,
        box("a100-80g", 400 * GIB, 4 * TB, 1, "A100-80GB + 400 GiB + 1 disk"),
        assumed="Llama shape, batch 32, 400 GiB",
    ),
    Record(
        "GreedySnake",
        "175B on one A100, 2.53 x ZeRO-Infinity",
        lambda: gpt(96, 12288, 96, 2048),
        32,
        2048,
        box("a100-80g", 400 * GIB, 8 * TB, 1, "A100-80GB + 400 GiB + 1 disk"),
        assumed="batch 32, 400 GiB",
    ),
    Record(
        "torchao",
        "1.1B vision transformer at 1.53 s a step of 32",
        lambda: gpt(40, 1536, 24, 257),
        32,
        257,
        TI,
        tokens=32 * 257 / 1.53,
        assumed="GPT shape, images of 256 patches; theirs keeps no fp32 masters",
    ),
    Record(
        "SlideFormer",
        "123B on one 4090",
        lambda: llama(88, 12288, 96, 8, 28672, 32768, 1024),
        16,
        1024,
        box("rtx4090", 256 * GIB, 8 * TB, 2, "4090 + 256 GiB + 2 disks"),
        assumed="batch 16, 256 GiB, 2 disks",
    ),
]


def plan(record: Record) -> dict[str, Any]:
    """A record beside its plan."""
    model = empty(record.config()).train()
    model.config.use_cache = False
    count = sum(p.numel() for p in model.parameters())
    published = record.tokens or record.tflops * 1e12 / (FLOPS_PER_PARAMETER * count)
    row: dict[str, Any] = {
        "system": record.system,
        "claim": record.claim,
        "machine": record.machine.name,
        "parameters": count,
        "assumed": record.assumed,
        "published_tokens_per_second": published,
    }
    ids = torch.empty((record.batch, record.length), dtype=torch.long, device="meta")
    try:
        made = outcore.plan(
            model,
            batch={"input_ids": ids, "labels": ids},
            machine=record.machine,
            precision=outcore.Precision(record.precision),  # type: ignore[arg-type]
        )
    except BudgetError as error:
        return row | {"fits": False, "remedy": error.remedy}
    return row | {
        "fits": True,
        "tokens_per_second": made.tokens_per_second,
        "bottleneck": made.bottleneck,
        "floor": made.tokens / made.floor,
        "micro_batch": made.micro_batch,
        "accumulate": made.accumulate,
        "activations": made.activations.blocks,
        "peak_bytes": dict(made.outcome.peak),
    }


HEAD = (
    "| system | claim | machine | model | fits | planned tokens/s | published tokens/s | planned / published "
    "| bound by, tokens/s | assumed |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def short(value: float) -> str:
    """Three digits that count, and no exponent."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def line(row: dict[str, Any]) -> str:
    """A row of the page."""
    published = row["published_tokens_per_second"]
    start = f"| {row['system']} | {row['claim']} | {row['machine']} | {row['parameters'] / 1e9:.1f}B "
    said = short(published) if published else "-"
    if not row["fits"]:
        return f"{start}| no | - | {said} | - | - | {row['assumed']} |"
    planned = row["tokens_per_second"]
    apart = f"{planned / published:.2f} x" if published else "-"
    return (
        f"{start}| yes | {short(planned)} | {said} | {apart} | {row['bottleneck']}, at most {short(row['floor'])} "
        f"| {row['assumed']} |"
    )


def paged(text: str, table: list[str]) -> str:
    """A page with this table in place of its own.

    Args:
        text: of a page with one table.
    """
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))
    return "\n".join([*lines[:first], *table, *lines[last:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=Path, help="the page whose table is made anew, if all rows are")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = list(HEAD)
    print(*HEAD, sep="\n")
    rows = []
    for record in RECORDS:
        if options.only.lower() in f"{record.system} {record.claim}".lower():
            start = time.process_time()
            rows.append(plan(record))
            table.append(line(rows[-1]))
            print(table[-1], flush=True)
            print(f"{record.claim}: {time.process_time() - start:.1f} s of CPU time", file=sys.stderr)
            if not rows[-1]["fits"]:
                print(f"{record.claim}: {rows[-1]['remedy']}", file=sys.stderr)
    if options.page and len(rows) == len(RECORDS):
        options.page.write_text(paged(options.page.read_text(), table))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "records": len(RECORDS)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
