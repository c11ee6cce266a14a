"""Shapes of a lap's inputs, as far as they tell what it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

Extents = tuple[tuple[int, ...], ...]
"""The shape of each input, in order."""


def extents_of(inputs: Iterable[torch.Tensor]) -> Extents:
    """The shapes of these."""
    return tuple(tuple(tensor.shape) for tensor in inputs)


def count(extents: Extents) -> int:
    """Elements in all."""
    return sum(map(math.prod, extents))


def covers(seen: Extents, other: Extents) -> bool:
    """Whether other inputs are in no dimension larger: then they take no more.

    Numbers of elements tell nothing: as many tokens in fewer and longer rows have larger attention scores.
    """
    return len(seen) == len(other) and all(
        len(a) == len(b) and all(m >= n for m, n in zip(a, b, strict=True))
        for a, b in zip(seen, other, strict=True)
    )
