"""Where the fp32 master of a parameter lives.

[Note: Split master]
A bf16 parameter is the upper half of its fp32 master, rounded to nearest even. So the lower half, 2 bytes
for each element, is all that has to be stored beside it. To undo the rounding one bit is missing: whether the
upper half was rounded up. Only a tie leaves that in doubt, but it costs nothing to keep it always: in the
sign bit of the second moment, which is never negative. Then

    master = (param_bits - carry) << 16 | low

and every fp32 value is kept exactly, except that all NaNs are one: 0x7FC00000, in every kind of `Master`, and
0x7FC0 in bf16. (torch's own conversion of a NaN gives 0x7FC0 or 0xFFFF, depending on the machine.)

States of this kind with AdamW: 2 + 4 + 4 bytes beside the 2 of the parameter, 12 in all instead of 14.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor


class Master(enum.Enum):
    """Where the fp32 master of a parameter lives, and what that costs beside the parameter."""

    NONE = "none"
    """The parameter is fp32 and its own master: nothing."""

    FULL = "full"
    """The first plane: 4 bytes for each element."""

    SPLIT = "split"
    """The parameter is bf16, the first plane holds the low 16 bits: 2 bytes for each element."""


def quiet(values: Tensor) -> Tensor:
    """fp32 values with every NaN made the one that kernels write; any shape."""
    return torch.where(values == values, values, math.nan)


def split_master(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split fp32 masters into what `Master.SPLIT` keeps.

    Args:
        master: fp32, any shape.

    Returns:
        The parameter (bf16, rounded to nearest even), the low bits (int16), and the carry (bool), each in the
        shape given. `with_carry` puts the carry where kernels look for it.
    """
    bits = quiet(master).view(torch.int32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    # arithmetic shifts keep both halves within int16, whose conversion is then defined
    low = (bits << 16) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), low.to(torch.int16), rounded != upper


def join_master(param: Tensor, low: Tensor, second: Tensor) -> Tensor:
    """The fp32 masters that `split_master` was given.

    Args:
        param: bf16.
        low: int16 bits, in the same shape.
        second: the fp32 second moment as stored, its sign bit being the carry; in the same shape.
    """
    upper = param.view(torch.int16).to(torch.int32) - second.signbit().to(torch.int32)
    return ((upper << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)


def with_carry(second: Tensor, carry: Tensor) -> Tensor:
    """A second moment (fp32) with its sign bit set to ``carry`` (bool)."""
    magnitude = second.view(torch.int32) & 0x7FFFFFFF
    return (magnitude | (carry.to(torch.int32) << 31)).view(torch.float32)
