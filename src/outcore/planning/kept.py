"""What an optimizer keeps of each parameter, as far as a plan counts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outcore.chunks.store import PlaneType
from outcore.optim.kernels import Rule
from outcore.optim.pipeline import master_kind


@dataclass(frozen=True)
class Kept:
    """States of parameters that compute in one dtype. Two optimizers that keep the same need the same room.

    Attributes:
        planes: the kinds of a state chunk's arrays.
        whole: whether a chunk holds whole parameters.
    """

    planes: tuple[PlaneType, ...]
    whole: bool

    @classmethod
    def of(cls, rule: Rule, dtype: torch.dtype) -> Kept:
        """What a rule keeps."""
        return cls(tuple(rule.planes(dtype, master_kind(rule, dtype))), rule.whole_parameters)

    def __str__(self) -> str:
        planes = (
            f"{plane.name} ({str(plane.dtype).removeprefix('torch.')}"
            + (f", one for {plane.shared})" if plane.shared > 1 else ")")
            for plane in self.planes
        )
        return f"{', '.join(planes) or 'nothing'}{' of whole parameters' if self.whole else ''}"
