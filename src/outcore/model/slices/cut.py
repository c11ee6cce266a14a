"""Which arguments of a block carry the batch, and so are cut in slices.

[Note: Rows]
The first floating argument of two or more dimensions is the hidden states; its dimension 0 is the batch, whose
entries are called rows. Every other tensor whose dimension 0 has the same size is cut along; all else (masks and
position embeddings of batch size 1, tensors without a batch, numbers, ``None``) passes whole. Sizes can coincide:
where the batch is as long as another dimension of the hidden states, a tensor of fewer dimensions may mean either,
and unless its name is known it is refused rather than guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from outcore.errors import ModelError
from outcore.model.trees import others_of, put_together, take_apart, tensors_of

ROWWISE = frozenset({"position_ids", "src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask"})
"""Names of arguments that carry the batch whenever their dimension 0 has its size."""

WHOLE = frozenset({"cache_position", "src_mask", "tgt_mask", "attn_mask"})
"""Names of arguments that speak of positions, whatever their size."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, taken apart.

    Attributes:
        skeleton: of ``(args, kwargs)``.
        tensors: each tensor once.
        by_rows: which of them are cut.
        rows: the size of the batch.
    """

    skeleton: Any
    tensors: tuple[torch.Tensor, ...]
    by_rows: tuple[bool, ...]
    rows: int

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return next(t.device for t, cut in zip(self.tensors, self.by_rows, strict=True) if cut)

    def with_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Arguments:
        """The same with other tensors, or with none where nobody is to keep them."""
        return replace(self, tensors=tensors)

    def pieces(self, start: int, stop: int) -> list[torch.Tensor]:
        """The tensors of the rows from ``start`` to ``stop``; those that aren't cut, whole."""
        return [t[start:stop] if cut else t for t, cut in zip(self.tensors, self.by_rows, strict=True)]

    def slices(self, rows: int) -> Iterator[tuple[int, int]]:
        """Starts and stops of slices of ``rows`` rows; the last may be shorter."""
        for start in range(0, self.rows, rows):
            yield start, min(start + rows, self.rows)

    def call(self, function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        """Call a function with other tensors in place of its own."""
        args, kwargs = put_together(self.skeleton, tensors)
        return function(*args, **kwargs)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that are cut alike."""
        return tuple((t.dim(), t.dtype, cut) for t, cut in zip(self.tensors, self.by_rows, strict=True))


def arguments_of(
    block: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Take the arguments of a call apart; see [Note: Rows].

    Args:
        block: its name, for messages.

    Raises:
        ModelError: it can't be told what carries the batch.
    """
    skeleton, tensors = take_apart((args, kwargs))
    hidden = _hidden(tensors)
    if hidden is None:
        raise ModelError(
            f"the block {block} is given no tensor with a batch dimension, so it can't run in slices: leave "
            "microbatch out"
        )
    rows = hidden.shape[0]
    for other in others_of(skeleton):
        if any(t.dim() and t.shape[0] == rows for t in tensors_of(other)):
            raise ModelError(
                f"the block {block} is given tensors within a {type(other).__name__}, which can't be cut in "
                "slices: pass them as tensors, tuples, lists or dicts, or leave microbatch out"
            )
    name_of = _names(function, args, kwargs)
    by_rows = tuple(_is_cut(block, t, hidden, name_of.get(id(t), "")) for t in tensors)
    return Arguments(skeleton, tuple(tensors), by_rows, rows)


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is given a cache of keys and values, which it would write to."""
    return any(hasattr(other, "get_seq_length") for other in others_of((args, kwargs)))


def _hidden(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    ranked = [t for t in tensors if t.is_floating_point() and t.dim() >= 2]
    return next(iter([*ranked, *(t for t in tensors if t.dim() >= 1)]), None)


def _names(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """The argument in which each tensor comes, by the tensor's identity."""
    try:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will say what is wrong with it
        return {}
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return {id(t): name for name, value in named.items() for t in tensors_of(value)}


def _is_cut(block: str, tensor: torch.Tensor, hidden: torch.Tensor, name: str) -> bool:
    rows = hidden.shape[0]
    if tensor is hidden:
        return True
    if tensor.dim() == 0 or tensor.shape[0] != rows or name in WHOLE:
        return False
    if tensor.dim() < hidden.dim() and rows in hidden.shape[1:] and name not in ROWWISE:
        raise ModelError(
            f"the block {block} is given {name or 'a tensor'} of shape {list(tensor.shape)} with hidden states of "
            f"shape {list(hidden.shape)}, so it can't be told whether it carries the batch: use another batch size"
        )
    return True
