"""What users may decide about a model: one small object per concern, each with a default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from outcore.errors import UsageError

PrecisionName = Literal["bf16", "fp16", "fp32"]
ActivationsName = Literal["keep", "recompute"]

_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class Precision:
    """The dtype in which a model computes. Masters and moments are always fp32.

    Attributes:
        compute: ``"bf16"`` (default), ``"fp16"`` with dynamic loss scaling (use `Optimizer.backward`),
            or ``"fp32"``.
    """

    compute: PrecisionName = "bf16"

    def __post_init__(self) -> None:
        if self.compute not in _DTYPES:
            raise UsageError(f"unknown precision {self.compute!r}; choose from {', '.join(_DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.compute]


@dataclass(frozen=True)
class Activations:
    """What happens to what a block's forward leaves for its backward.

    Attributes:
        blocks: ``"keep"`` it, or ``"recompute"`` it from the block's input (Chen et al. 2016, "Training
            Deep Nets with Sublinear Memory Cost"). The result is the same to the bit.
    """

    blocks: ActivationsName = "keep"

    def __post_init__(self) -> None:
        if self.blocks not in get_args(ActivationsName):
            known = ", ".join(get_args(ActivationsName))
            raise UsageError(f"unknown way with activations {self.blocks!r}; choose from {known}")
