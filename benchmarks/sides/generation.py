"""Contenders that generate from weights on disk, in less memory than the weights."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

import outcore
from sides.models import MODELS, batch


def write_weights(model: str, folder: Path) -> int:
    """Save a model in bf16 as a Hugging Face directory; returns the bytes of its weights."""
    built = MODELS[model].build().to(torch.bfloat16)
    built.config.use_cache = True
    built.save_pretrained(folder, max_shard_size="100GB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def forget_pages(folder: Path) -> None:
    """Let the page cache forget the files of a folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def generate(
    contender: str,
    model: str,
    weights: str,
    rows: int,
    tokens: int,
    new_tokens: int,
    device: str,
    disk: str,
    budget: dict[str, str],
) -> dict[str, Any]:
    """Load and generate; the time of the prompt is apart from that of the tokens after it."""
    make = {"outcore": _outcore, "accelerate": _accelerate}[contender]
    made = make(weights, device, disk, budget)
    ids = batch(model, rows, tokens, 0).to(device)
    stamps: list[float] = []
    reads: list[dict[str, int]] = []
    seen: dict[str, int] = {}

    def note(module: Any, args: Any, output: Any) -> None:
        stamps.append(time.perf_counter())
        if contender == "outcore":
            now = dict(outcore.snapshot(made).moved)
            reads.append({link: nbytes - seen.get(link, 0) for link, nbytes in now.items()})
            seen.update(now)

    made.register_forward_hook(note)
    start = time.perf_counter()
    out = made.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    times = [b - a for a, b in zip([start, *stamps], stamps, strict=False)]
    return {
        "prompt_seconds": times[0],
        "seconds": times[1:],
        "tokens": out[:, ids.shape[1] :].flatten().tolist(),
        "moved": reads[-1] if reads else {},
    }


def _outcore(weights: str, device: str, disk: str, budget: dict[str, str]) -> Any:
    from outcore.integrations.transformers import build

    built = build(weights, training=False)
    outcore.offload(
        built.model,
        device=device,
        budget=outcore.Budget(**budget, disk=disk),
        precision=outcore.Precision("bf16"),
        weights=weights,
    )
    return built.model


def _accelerate(weights: str, device: str, disk: str, budget: dict[str, str]) -> Any:
    """A disk ``device_map`` whose share in memory is as large as outcore's budget; it reads the weights' own file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        weights,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": budget["host"]},
        offload_folder=disk,
    ).eval()
