"""Matrix products in bf16 and fp16 on processors that have no instructions for them.

[Note: Widened products]
Without AVX-512, which most laptops and desktops lack, torch multiplies bf16 matrices in plain loops: 1 GFLOP/s on two
cores of such a processor, 13 if one operand is transposed, where fp32 reaches 100. A step of GPT-2 with 1,024 tokens
took minutes. Here blocks of both operands are widened to fp32, multiplied and summed there, and rounded once, at
the speed of fp32.

Sums then have another order than in torch's loops, so their last bits differ. That would break the promise that an
offloaded model computes what it computes in memory, if it came with `outcore.offload`; so it is a switch of the
process, which holds for all that multiplies in it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_ROWS, _COLUMNS, _DEPTH = 512, 1024, 1024
"""A block: at most 8 MiB of fp32 for both operands and the result. Small matrices of a batch are widened together."""

_registered: torch.library.Library | None = None
"""Our kernels. Once there they stay: other threads may be in them when it is switched off."""

_active: tuple[torch.dtype, ...] = ()
"""The dtypes that are widened now."""


def slow_dtypes() -> tuple[torch.dtype, ...]:
    """In which dtypes torch multiplies matrices in plain loops on this processor; none if the environment variable
    ``OUTCORE_MATMULS`` is ``torch``, which leaves them to it."""
    if os.environ.get("OUTCORE_MATMULS") == "torch":
        return ()
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return tuple(dtype for dtype, name in known.items() if not getattr(torch.ops.mkldnn, name)())


def widen_matmuls(on: bool = True) -> bool:
    """Multiply bf16 and fp16 matrices on the CPU as fp32, rounding once, where torch would take plain loops.

    Holds for the process. Changes nothing on a processor that computes in these dtypes, on accelerators, and for other
    dtypes. Results have the precision of torch's, with sums in another order.

    Args:
        on: false takes it back.

    Returns:
        Whether products of some dtype are widened now.
    """
    global _registered, _active
    _active = slow_dtypes() if on else ()
    if _active and _registered is None:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="[\\s\\S]*overrid", category=UserWarning)
            for name, kernel in _KERNELS.items():
                original = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed
                library.impl(name, partial(kernel, original), "CPU", with_keyset=True)
        _registered = library
    return bool(_active)


def is_widening() -> bool:
    """Whether `widen_matmuls` is on, and needed here."""
    return bool(_active)


def warn_if_slow(dtype: torch.dtype, device: torch.device) -> None:
    """Say what computing in ``dtype`` would be like, if it is on this processor, and what helps."""
    if device.type == "cpu" and not is_widening() and dtype in slow_dtypes():
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"this processor has no instructions for {name}, and torch multiplies matrices in it many times slower "
            "than in fp32: call outcore.widen_matmuls() first, or compute with precision=outcore.Precision('fp32')",
            stacklevel=3,
        )


One = Callable[..., torch.Tensor]
Several = Callable[..., tuple[torch.Tensor, ...]]
"""Kernels of torch's; the first argument are the dispatch keys of the call."""


def _plain(
    rank: int, original: One, keys: Any, a: torch.Tensor, b: torch.Tensor, **given: torch.Tensor
) -> torch.Tensor:
    """``mm`` and ``bmm``, of matrices or batches of them; ``out`` may be given."""
    out = _target(rank, a, b, **given)
    return original(keys, a, b, **given) if out is None else _multiply(a, b, out)


def _added(
    rank: int,
    original: One,
    keys: Any,
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
    **given: torch.Tensor,
) -> torch.Tensor:
    """``addmm`` and ``baddbmm``; ``out`` may be given."""
    out = _target(rank, a, b, **given) if bias.dtype is a.dtype else None
    if out is None:
        return original(keys, bias, a, b, beta=beta, alpha=alpha, **given)
    return _multiply(a, b, out, bias.expand(out.shape), beta, alpha)


def _added_in_place(
    rank: int,
    original: One,
    keys: Any,
    own: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> torch.Tensor:
    """``addmm_`` and ``baddbmm_``: each block of what is there is read before it is written."""
    out = _target(rank, a, b, own)
    if out is None:
        return original(keys, own, a, b, beta=beta, alpha=alpha)
    return _multiply(a, b, out, own, beta, alpha)


def _attention(
    original: Several,
    keys: Any,
    *operands: Any,
    attn_mask: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, ...]:
    """Flash attention and its backward: rows of the batch at a time, in fp32.

    What comes out in fp32 anyway (the sums of exponentials) stays so.
    """
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    dtype = tensors[0].dtype
    if dtype not in _active or not tensors[0].is_cpu or tensors[0].numel() == 0:
        return original(keys, *operands, attn_mask=attn_mask, **how)
    found: list[list[torch.Tensor]] = []
    size = max(tensor[0].numel() for tensor in tensors)
    for rows in _blocks(len(tensors[0]), max(1, _ROWS * _COLUMNS // size)):
        widened = (
            operand[rows].float() if isinstance(operand, torch.Tensor) else operand for operand in operands
        )
        mask = attn_mask
        if mask is not None:
            mask = mask[rows] if mask.dim() == 4 and len(mask) > 1 else mask
            mask = mask.float() if mask.is_floating_point() else mask
        results = original(keys, *widened, attn_mask=mask, **how)
        found.append([*results])
    kept = [True, False] if len(found[0]) == 2 else [True] * len(found[0])
    parts = (
        [part[number].to(dtype) if rounded else part[number] for part in found]
        for number, rounded in enumerate(kept)
    )
    return tuple(part[0] if len(part) == 1 else _joined(part) for part in parts)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of results of attention, shape [rows, heads, tokens, ...], laid out as torch lays them out: heads within
    tokens."""
    return torch.cat([part.transpose(1, 2) for part in parts]).transpose(1, 2)


_KERNELS: dict[str, Callable[..., Any]] = {
    "mm": partial(_plain, 2),
    "mm.out": partial(_plain, 2),
    "bmm": partial(_plain, 3),
    "bmm.out": partial(_plain, 3),
    "addmm": partial(_added, 2),
    "addmm.out": partial(_added, 2),
    "addmm_": partial(_added_in_place, 2),
    "baddbmm": partial(_added, 3),
    "baddbmm.out": partial(_added, 3),
    "baddbmm_": partial(_added_in_place, 3),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
}
"""The operators that all dense products come to, also those of autograd's formulas."""


def _target(
    rank: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Where a product goes; ``None`` if it isn't ours. What can't be multiplied, or can't be put into ``out`` as it is,
    is not: torch says what is wrong with it."""
    suits = (
        a.dtype in _active
        and a.is_cpu  # a device may have the CPU's kernels work on memory of its own
        and a.dtype is b.dtype
        and a.dim() == b.dim() == rank
        and a.shape[:-2] == b.shape[:-2]
        and a.shape[-1] == b.shape[-2]
        and min(a.numel(), b.numel()) > 0
    )
    if not suits:
        return None
    shape = (*a.shape[:-1], b.shape[-1])
    if out is None:
        return a.new_empty(shape)
    suits = out.dtype is a.dtype and out.shape == shape and out.is_cpu
    return (
        out if suits and torch._debug_has_internal_overlap(out) != 1 else None
    )  # 1: some elements are one in memory


def _multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    beta: Any = 0,
    alpha: Any = 1,
) -> torch.Tensor:
    """Put ``beta * bias + alpha * (a @ b)`` of two matrices, or two batches of them, into ``out``, block by block."""
    read = [a, b] if bias is None or _is_same(bias, out) else [a, b, bias]
    if any(out.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in read):
        # a block that is written may be read for the next one
        return out.copy_(_multiply(a, b, torch.empty_like(out), bias, beta, alpha))
    depth = a.shape[-1]
    each = max(a.shape[-2] * depth, depth * b.shape[-1], a.shape[-2] * b.shape[-1])
    batches = (
        [()] if a.dim() == 2 else [(some,) for some in _blocks(len(a), max(1, _ROWS * _COLUMNS // each))]
    )
    for some in batches:
        for rows in _blocks(a.shape[-2], _ROWS):
            for columns in _blocks(b.shape[-1], _COLUMNS):
                parts = (
                    (a[*some, rows, within].float(), b[*some, within, columns].float())
                    for within in _blocks(depth, _DEPTH)
                )
                acc = torch.matmul(*next(parts))
                for left, right in parts:
                    acc = acc.addmm_(left, right) if a.dim() == 2 else acc.baddbmm_(left, right)
                if alpha != 1:
                    acc.mul_(alpha)
                if bias is not None and beta != 0:  # with 0 the bias doesn't count, not even its NaNs
                    acc.add_(bias[*some, rows, columns], alpha=beta)
                out[*some, rows, columns] = acc
    return out


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether each element of one is the same memory as that of the other."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _blocks(size: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]
