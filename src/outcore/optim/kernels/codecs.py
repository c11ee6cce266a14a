"""How moments are kept: in fp32, or narrower and then not exactly.

[Note: Rounding that does not stall]
With beta2 = 0.999 a second moment shrinks by a thousandth a step, and numbers of 8 significant bits are four to eight
thousandths apart: rounded to nearest it would never move. So what is cut off is first added to a threshold that changes
with the step: the bits of the step's number in reverse order (van der Corput's sequence), shifted round by another
amount for each of `SHARED` neighbours. Over any 2^k steps the thresholds of an element are spread evenly, so that it is
rounded up as often as what is cut off says, and the mean is kept. There is no random number in it: the threshold
follows from the step and the place within the parameter alone, and so bits are the same for every chunk size, placement
and number of threads.

[Note: Eight bits]
`SHARED` neighbours share a window that ends with the largest of them (block-wise quantisation; Dettmers et al. 2022,
"8-bit optimizers via block-wise quantization"). What is kept of a value are the uppermost bits of its fp32 form,
exponent and 3 bits of mantissa for the first moment, 2 for the second, less those of the window's beginning, in 7 bits.
So steps are relative as in Dettmers' dynamic tree, the arithmetic is that of integers, and what was rounded once is
kept exactly by any further reading and writing. The first moment reaches over 16 octaves and falls to zero below; the
second over 32 (16 in its root), and never becomes zero unless it is, because what is divided by it would explode. The
eighth bit is the first moment's sign, or the carry of `outcore.optim.kernels.master`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from outcore.chunks.layout import ALIGN
from outcore.chunks.store import PlaneType
from outcore.errors import UsageError

Moments = Literal["fp32", "bf16", "8bit"]

SHARED = ALIGN
"""Neighbours that share a window: parameters and ranges of ranks begin at multiples of it."""

SHIFTS = (20, 21)
"""Bits of an fp32 number that 8-bit first and second moments don't have."""

CODES = 127
"""The largest code in seven bits."""


class Codec(Protocol):
    """How two moments are kept in planes. The sign bit of a value is kept as it is."""

    @property
    def kernel(self) -> str:
        """What the names of update kernels end in."""

    def planes(self, names: Sequence[str]) -> tuple[PlaneType, ...]:
        """One plane for each moment, in their order, then what neighbours share."""

    def check(self, param_dtype: torch.dtype) -> None:
        """Raises UsageError: parameters of this dtype can't have such moments."""

    def scalars(self, step: int) -> tuple[Any, ...]:
        """The last arguments of an update kernel."""

    def read(self, planes: Sequence[Tensor], k: int, part: slice) -> Tensor:
        """Elements of moment ``k`` in fp32; ``part`` begins at a multiple of `SHARED`."""

    def write(self, planes: Sequence[Tensor], k: int, part: slice, values: Tensor) -> None:
        """Set them, rounded to nearest."""


@dataclass(frozen=True)
class Exact:
    """fp32."""

    kernel: str = ""

    def planes(self, names: Sequence[str]) -> tuple[PlaneType, ...]:
        return tuple(PlaneType(name, torch.float32) for name in names)

    def check(self, param_dtype: torch.dtype) -> None:
        del param_dtype

    def scalars(self, step: int) -> tuple[Any, ...]:
        del step
        return ()

    def read(self, planes: Sequence[Tensor], k: int, part: slice) -> Tensor:
        return planes[k][part]

    def write(self, planes: Sequence[Tensor], k: int, part: slice, values: Tensor) -> None:
        planes[k][part] = values


class _Narrow:
    def check(self, param_dtype: torch.dtype) -> None:
        if param_dtype is torch.float16:
            raise UsageError(
                "moments of fp16 parameters must be fp32: compute in bf16, or leave moments='fp32'"
            )

    def scalars(self, step: int) -> tuple[Any, ...]:
        return (np.uint32(int(f"{step & 0xFFFFFFFF:032b}"[::-1], 2)),)


@dataclass(frozen=True)
class Bf16(_Narrow):
    """The upper half of fp32, see [Note: Rounding that does not stall]."""

    kernel: str = "_bf16"

    def planes(self, names: Sequence[str]) -> tuple[PlaneType, ...]:
        return tuple(PlaneType(name, torch.bfloat16) for name in names)

    def read(self, planes: Sequence[Tensor], k: int, part: slice) -> Tensor:
        return (planes[k][part].view(torch.int16).int() << 16).view(torch.float32)

    def write(self, planes: Sequence[Tensor], k: int, part: slice, values: Tensor) -> None:
        bits = values.view(torch.int32)
        kept = (((bits & 0x7FFFFFFF) + 0x8000) >> 16) | ((bits >> 16) & -0x8000)
        planes[k][part].view(torch.int16).copy_(kept)


@dataclass(frozen=True)
class Bytes(_Narrow):
    """See [Note: Eight bits]."""

    kernel: str = "_8bit"

    def planes(self, names: Sequence[str]) -> tuple[PlaneType, ...]:
        windows = tuple(PlaneType(f"{name}_window", torch.int16, SHARED) for name in names)
        return (*(PlaneType(name, torch.uint8) for name in names), *windows)

    def read(self, planes: Sequence[Tensor], k: int, part: slice) -> Tensor:
        return unpacked(planes[k][part], planes[k + 2][_windows(part)], SHIFTS[k])

    def write(self, planes: Sequence[Tensor], k: int, part: slice, values: Tensor) -> None:
        bits = values.view(torch.int32)
        cut = ((bits & 0x7FFFFFFF) + (1 << (SHIFTS[k] - 1))) >> SHIFTS[k]
        least = (values.abs() > 0) & (k == 1)
        codes, windows = packed(cut, bits < 0, least)
        planes[k][part].copy_(codes)
        planes[k + 2][_windows(part)].copy_(windows)


FP32 = Exact()
CODECS: dict[str, Codec] = {"fp32": FP32, "bf16": Bf16(), "8bit": Bytes()}


def codec(moments: str) -> Codec:
    """The codec of this name.

    Raises:
        UsageError: there is none.
    """
    found = CODECS.get(moments)
    if found is None:
        raise UsageError(f"moments are kept as {', '.join(CODECS)}, not as {moments!r}")
    return found


def unpacked(codes: Tensor, windows: Tensor, shift: int) -> Tensor:
    """fp32 values of 8-bit codes, the eighth bit as the sign.

    Args:
        codes: uint8, shape [n].
        windows: int16, shape [ceil(n / SHARED)]: where each block's codes begin.
    """
    wide = codes.int()
    code = wide & CODES
    begin = windows.int().repeat_interleave(SHARED)[: codes.numel()]
    bits = torch.where(code == 0, 0, (code + begin) << shift)
    return (bits | ((wide >> 7) << 31)).view(torch.float32)


def packed(cut: Tensor, upper: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and windows (int16) of magnitudes.

    Args:
        cut: int32, shape [n]: the uppermost bits of magnitudes.
        upper: bool: the eighth bit.
        least: bool: what may not become zero.
    """
    n = cut.numel()
    whole = torch.zeros(-(-n // SHARED) * SHARED, dtype=torch.int32)
    whole[:n] = cut
    begin = (whole.view(-1, SHARED).amax(1) - CODES).clamp_(min=0)
    code = (cut - begin.repeat_interleave(SHARED)[:n]).clamp_(min=0)
    code = torch.where((code == 0) & least, 1, code)
    return (code | (upper.int() << 7)).to(torch.uint8), begin.to(torch.int16)


def _windows(part: slice) -> slice:
    assert part.start % SHARED == 0
    return slice(part.start // SHARED, -(-part.stop // SHARED))
