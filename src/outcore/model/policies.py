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
        microbatch: rows of a slice: each recomputed block runs the batch in slices along dimension 0, in forward
            and in backward, so that its parameters are fetched once for all of them while the activations of
            one slice exist at a time. Give the batch whole instead of accumulating; gradients are what
            accumulation gives (`docs/slices.md`). ``None`` runs the batch as one.
        loss_slice: positions (rows times tokens) of a slice of the head and the cross-entropy, for causal
            language models of transformers that outcore knows; the logits of a batch then never exist whole.
            By default as many as the tokens of a ``microbatch``, and none if there is none.

    Raises:
        UsageError: a setting that can't mean anything.
    """

    blocks: ActivationsName = "keep"
    microbatch: int | None = None
    loss_slice: int | None = None

    def __post_init__(self) -> None:
        if self.blocks not in get_args(ActivationsName):
            known = ", ".join(get_args(ActivationsName))
            raise UsageError(f"unknown way with activations {self.blocks!r}; choose from {known}")
        if self.microbatch is not None and self.blocks != "recompute":
            raise UsageError(
                'microbatch works on recomputed blocks: give Activations("recompute", microbatch=...)'
            )
        for name in ("microbatch", "loss_slice"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, and is {value!r}")
