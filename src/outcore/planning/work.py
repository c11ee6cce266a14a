"""What an operator costs: operations of its matrix products, bytes it reads and writes.

Counts of operations are those of `torch.utils.flop_counter`; a multiplication and an addition are two. Attention
counts both products in full, also where a causal mask would save half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


@dataclass
class Work:
    """Work that can be added up.

    Attributes:
        flops: of matrix products and attention, by precision.
        nbytes: read and written by all other operators.
        operators: how many ran, views not counted.
        attention: operations of attention among ``flops``, by precision.
        operands: bytes of what matrix products and attention read and write.
    """

    flops: dict[str, int]
    nbytes: int = 0
    operators: int = 0
    attention: dict[str, int] = field(default_factory=dict)
    operands: int = 0

    @classmethod
    def none(cls) -> Work:
        return cls({})

    def add(self, other: Work) -> None:
        for dtype, count in other.flops.items():
            self.flops[dtype] = self.flops.get(dtype, 0) + count
        for dtype, count in other.attention.items():
            self.attention[dtype] = self.attention.get(dtype, 0) + count
        self.nbytes += other.nbytes
        self.operands += other.operands
        self.operators += other.operators

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """An operator ran."""
        if func.is_view or func in _FREE:
            return
        self.operators += 1
        count = _operations(func, args, kwargs, result)
        if count:
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            name = _NAMES.get(first.dtype, "fp32")
            self.flops[name] = self.flops.get(name, 0) + count
            if func._overloadpacket.__name__.removesuffix("_backward") in _ATTENTION:
                self.attention[name] = self.attention.get(name, 0) + count
        leaves = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        if count:
            self.operands += nbytes
        else:
            self.nbytes += nbytes


_FREE = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.prim.device.default}
)


def _operations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    name = packet.__name__
    if name.removesuffix("_backward") in _ATTENTION:
        if name.endswith("_backward"):
            return int(sdpa_backward_flop_count(*(a.shape for a in args[:4])))
        return int(sdpa_flop_count(*(a.shape for a in args[:3])))
    counter = flop_registry.get(packet)
    return 0 if counter is None else int(counter(*args, **kwargs, out_val=result))
