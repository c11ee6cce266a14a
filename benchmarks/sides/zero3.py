"""DeepSpeed ZeRO-3 with everything offloaded to the CPU or to disk.

Its settings are what was fastest here: no pinned memory on a machine without an accelerator, requests of 8 MiB with a
queue of 32 on disk, submissions and completions overlapped. Its pipelined NVMe mode fails an assertion with this
model, so reads and writes of optimizer states don't overlap the update.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import torch

from sides.models import MODELS
from sides.training import BETAS, CLIP, DECAY, EPS, LR, Settings, recomputing

AIO = {
    "block_size": 8 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}


def configuration(settings: Settings, where: Literal["cpu", "nvme"], largest: int) -> dict[str, Any]:
    """The dict that DeepSpeed calls its config.

    Args:
        largest: elements of the largest parameter: a swap buffer must hold it.
    """
    pinned = torch.device(settings.device).type != "cpu"
    place: dict[str, Any] = {"device": where, "pin_memory": pinned}
    parameters: dict[str, Any] = {**place}
    states: dict[str, Any] = {**place}
    if where == "nvme":
        parameters |= {"nvme_path": settings.disk, "buffer_count": 5, "buffer_size": largest + 1024}
        states |= {"nvme_path": settings.disk, "buffer_count": 4, "fast_init": False}
    return {
        "train_micro_batch_size_per_gpu": settings.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": parameters,
            "offload_optimizer": states,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 100_000_000,
        },
        "aio": AIO,
        "steps_per_print": 1 << 30,
    }


class ZeRO3:
    """DeepSpeed's engine and its loop."""

    def __init__(self, settings: Settings, where: Literal["cpu", "nvme"]) -> None:
        if settings.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        if settings.ranks == 1:
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
        import deepspeed

        backend = "gloo" if settings.device == "cpu" else None
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        model: Any = recomputing(MODELS[settings.model].build())
        largest = max(parameter.numel() for parameter in model.parameters())
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=configuration(settings, where, largest),
        )
        self.update = 0.0

    def step(self, ids: torch.Tensor) -> float:
        loss = self._engine(input_ids=ids, labels=ids).loss
        self._engine.backward(loss)
        start = time.perf_counter()
        self._engine.step()
        self.update = time.perf_counter() - start
        return float(loss.item())

    def moved(self) -> dict[str, int]:
        return {}
