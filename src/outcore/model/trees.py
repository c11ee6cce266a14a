"""Tensors within nested arguments and outputs.

Only plain containers are rebuilt. Anything else (a cache, a user's object) is passed on as it is, since a
copy of it would lose what a module writes into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def change_tensors(tree: Any, change: Change) -> Any:
    """The same tree with every tensor in tuples, lists and dicts replaced by ``change(tensor)``."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    kind = type(tree)
    if kind is list:
        return [change_tensors(item, change) for item in tree]
    if kind is tuple:
        return tuple(change_tensors(item, change) for item in tree)
    if kind is dict:
        return {key: change_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(change_tensors(item, change) for item in tree))
    return tree


def tensors_of(tree: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth == 0:
        return
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item, depth - 1)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item, depth - 1)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_of(getattr(tree, field.name, None), depth - 1)
