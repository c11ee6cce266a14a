"""From tensors to kernels: checks, views, and the split over threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outcore.errors import UsageError
from outcore.optim.kernels import choice, half
from outcore.optim.kernels.choice import Array
from outcore.optim.kernels.codecs import SHARED
from outcore.optim.kernels.workers import Workers, workers

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def update(
    name: str,
    param: Tensor,
    grad: Tensor,
    master: Tensor | None,
    moments: Sequence[Tensor],
    scalars: tuple[Any, ...],
    pool: Workers | None,
    kept: Sequence[torch.dtype] = (torch.float32,),
    shared: Sequence[Tensor] = (),
) -> None:
    """Run an update kernel over all elements.

    Args:
        name: the kernel.
        param: the parameter, shape [n]; written.
        grad: the gradient, shape [n], bf16, fp16 or fp32.
        master: the plane of the master, shape [n], if there is one; written.
        moments: planes, each of shape [n]; written.
        scalars: the kernel's other arguments.
        pool: threads to use; `workers` if not given.
        kept: the dtypes that moments may have.
        shared: planes of shape [ceil(n / SHARED)], after the moments; written.

    Raises:
        UsageError: tensors that are not 1-D, contiguous, on the CPU, of one length and of a dtype that fits.
    """
    n = check(param, grad, *moments, *(() if master is None else (master,)))
    check_float(grad)
    _check_master(param, master)
    for moment in moments:
        if moment.dtype not in kept:
            raise UsageError(f"a moment plane must be {_short(kept[0])}, not {moment.dtype}")
    if n == 0:
        return
    arrays = [array(param), array(grad), None if master is None else array(master), *map(array, moments)]
    windows = [array(plane) for plane in shared]
    halves = torch.float16 in (param.dtype, grad.dtype)
    kernel = (half.around if halves else choice.kernel)(name, [*arrays, *windows], scalars)

    def piece(start: int, stop: int) -> None:  # starts are multiples of the grain, and that of SHARED
        own = (None if whole is None else whole[start:stop] for whole in arrays)
        kernel(*own, *(window[start // SHARED : -(-stop // SHARED)] for window in windows), *scalars)

    (pool or workers()).run(piece, n)


def array(tensor: Tensor) -> Array:
    """A NumPy view: bf16 and int16 as uint16 bits, other dtypes as they are."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.int16, torch.uint16):
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def check(*tensors: Tensor) -> int:
    """The common length of 1-D contiguous CPU tensors.

    Raises:
        UsageError: they are something else.
    """
    n = tensors[0].numel()
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise UsageError(
                "kernels take 1-D contiguous CPU tensors, not one of shape "
                f"{tuple(tensor.shape)} and stride {tensor.stride()} on {tensor.device}"
            )
        if tensor.numel() != n:
            raise UsageError(f"kernels take tensors of one length, not {n} and {tensor.numel()} elements")
    return n


def check_float(tensor: Tensor) -> None:
    """Refuse dtypes that are no float of 16 or 32 bits.

    Raises:
        UsageError: the dtype is another.
    """
    if tensor.dtype not in FLOATS:
        raise UsageError(f"expected float32, bfloat16 or float16, not {tensor.dtype}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_master(param: Tensor, master: Tensor | None) -> None:
    if master is None:
        fits = param.dtype is torch.float32
    elif master.dtype is torch.float32:
        fits = param.dtype in (torch.bfloat16, torch.float16)
    else:
        fits = master.dtype in (torch.int16, torch.uint16) and param.dtype is torch.bfloat16
    if not fits:
        stored = "no master plane" if master is None else f"a master plane of {master.dtype}"
        raise UsageError(f"a parameter of {param.dtype} can't have {stored}")
