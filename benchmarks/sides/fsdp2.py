"""FSDP2, its shards on the CPU (``CPUOffloadPolicy``): torch's own way to offload."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from sides.models import MODELS
from sides.training import BETAS, DECAY, EPS, LR, Ordinary, Settings, Trainer, recomputing


def make(settings: Settings, sums: torch.dtype = torch.float32, keep: bool = False) -> Trainer:
    """Blocks and the rest are one group each; bf16 in forward and backward, fused AdamW on fp32 shards.

    Args:
        sums: the dtype in which gradients are sent and summed.
        keep: gathered parameters stay from forward to backward.
    """
    kind = torch.device(settings.device).type
    on_cpu = kind == "cpu"
    backend = "gloo" if on_cpu else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    if settings.ranks > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh(kind, list(range(settings.ranks)))
    model: Any = recomputing(MODELS[settings.model].build())
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=sums),
        "reshard_after_forward": not keep,
        "offload_policy": CPUOffloadPolicy(pin_memory=not on_cpu),
    }
    for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    if not on_cpu:
        for _, owner in list(model.named_modules()):
            for name, buffer in list(owner.named_buffers(recurse=False)):
                owner._buffers[name] = buffer.to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY, fused=True)
    return Ordinary(model, optimizer, lambda ids: model(input_ids=ids, labels=ids).loss)
