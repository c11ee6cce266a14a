"""ZeRO-1, -2, -3, hybrid sharding and outcore from 8 to 4,096 accelerators, on paper: the tables of docs/scale.md.

python benchmarks/scale.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import outcore
from outcore.integrations.shapes import shape
from outcore.planning.cluster import Cluster
from outcore.planning.machine import DESCRIBED
from outcore.planning.scale import Spread, spread
from outcore.planning.settings import said
from outcore.planning.subject import Subject

GPUS = 8


@dataclass(frozen=True)
class Page:
    """A model on nodes of one kind; each rank takes the same batch, however many there are."""

    model: str
    machine: str
    host: int
    batch: int
    length: int
    nodes: tuple[int, ...]


PAGES = (
    Page("llama-7b", "rtx4090", 5 * 10**11, 2, 1024, (1, 8, 64, 512)),
    Page("llama-7b", "a100-80g", 2 * 10**12, 4, 2048, (1, 8, 64, 512)),
    Page("llama-70b", "h100", 2 * 10**12, 2, 2048, (1, 8, 64, 512)),
    Page("gpt3-175b", "h100", 2 * 10**12, 1, 2048, (1, 8, 64, 512)),
)


def rows(page: Page) -> Iterator[tuple[bool, Spread]]:
    """Every way at every size, without and with reduction in the switches."""
    model = shape(page.model).model
    ids = torch.empty((page.batch, page.length), dtype=torch.long, device="meta")
    subject = Subject(model, outcore.AdamW(model.parameters()), {"input_ids": ids, "labels": ids})
    machine = DESCRIBED[page.machine].sized(host=page.host)
    for nodes in page.nodes:
        plain, aided = (spread(subject, Cluster(machine, nodes, GPUS, switch)) for switch in (False, True))
        for first, second in zip(plain, aided, strict=True):
            yield False, first
            yield True, second


def gigabytes(way: Spread, tier: str) -> str:
    held = way.memory.total(tier) / 1e9
    return f"{held:,.1f}" if held else "-"


def line(plain: Spread, aided: Spread) -> str:
    """A row of the page."""
    held = " / ".join(gigabytes(plain, tier) for tier in ("device", "host", "disk"))
    start = f"| {plain.ranks:,} | {plain.name} | {held} "
    if not plain.fits:
        return f"{start}| does not fit | | | | | |"
    turns = f" x {plain.settings.accumulate}" if plain.settings.accumulate > 1 else ""
    settings = f"{plain.settings.micro_batch}{turns}, {said(plain.settings.activations)}"
    each = plain.tokens_per_second / plain.ranks
    return (
        f"{start}| {settings} | {plain.sent['within'] / 1e9:,.1f} / {plain.sent['network'] / 1e9:,.1f} "
        f"| {plain.seconds:.3g} | {100 * plain.compute / plain.seconds:.0f} % | {each:,.4g} "
        f"| {aided.tokens_per_second / aided.ranks / each:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    every = []
    for page in PAGES:
        print(
            f"\n### {page.model} on nodes of {GPUS} x {page.machine}, {page.host / 1e12:.3g} TB of host memory, "
            f"{page.batch} x {page.length} tokens per rank\n\n"
            "| ranks | way | device / host / disk, GB | sequences, activations | sent in node / network, GB | step, s "
            "| computes | tokens/s per rank | with reducing switches |\n|---|---|---|---|---|---|---|---|---|"
        )
        found = list(rows(page))
        every += [{"model": page.model, "in_network": aided, **way.as_dict()} for aided, way in found]
        for (_, plain), (_, aided) in zip(found[::2], found[1::2], strict=True):
            print(line(plain, aided), flush=True)
    if options.json:
        options.json.write_text(json.dumps(every, indent=1) + "\n")


if __name__ == "__main__":
    main()
