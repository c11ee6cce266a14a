"""Tensors within nested arguments and outputs.

Only plain containers are rebuilt. Anything else (a cache, a user's object) is passed on as it is, since a
copy of it would lose what a module writes into it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Hole:
    """Where a tensor was in a tree that was taken apart, by its number."""

    number: int


def change_tensors(tree: Any, change: Change) -> Any:
    """The same tree with every tensor in tuples, lists and dicts replaced by ``change(tensor)``."""
    return _change(tree, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def take_apart(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree with holes for its tensors, and the tensors; one that is there twice has one number."""
    tensors: list[torch.Tensor] = []
    number_of: dict[int, int] = {}

    def take(tensor: torch.Tensor) -> Any:
        if id(tensor) not in number_of:
            number_of[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return Hole(number_of[id(tensor)])

    return change_tensors(tree, take), tensors


def put_together(skeleton: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Undo `take_apart`, with tensors that may be others."""
    return _change(skeleton, lambda leaf: tensors[leaf.number] if isinstance(leaf, Hole) else leaf)


def others_of(skeleton: Any) -> list[Any]:
    """What a tree that was taken apart holds besides tensors, containers that are not rebuilt included."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if not isinstance(leaf, Hole):
            found.append(leaf)
        return leaf

    _change(skeleton, note)
    return found


def structure_of(skeleton: Any) -> Any:
    """What two trees have in common that differ in tensors and other leaves alone."""
    return _change(skeleton, lambda leaf: leaf if isinstance(leaf, Hole) else type(leaf))


def _change(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A container in which nothing changes is given back itself: it may be there to be filled."""
    kind = type(tree)
    if kind is dict:
        mapping = {key: _change(item, change) for key, item in tree.items()}
        return tree if all(mapping[key] is item for key, item in tree.items()) else mapping
    named = isinstance(tree, tuple) and hasattr(tree, "_fields")
    if kind is not list and kind is not tuple and not named:
        return change(tree)
    items = [_change(item, change) for item in tree]
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    return kind(*items) if named else kind(items)


def change_everywhere(tree: Any, change: Change) -> Any:
    """The same tree with every tensor replaced that `tensors_of` finds; other mappings and dataclasses are copied.

    A container of a kind of its own that is neither stays as it is.
    """

    def leaf(found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return change(found)
        if isinstance(found, dict):
            mapping = copy.copy(found)
            for key, item in found.items():
                mapping[key] = change_everywhere(item, change)
            return mapping
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            changed = copy.copy(found)
            for name in (field.name for field in dataclasses.fields(found) if hasattr(found, field.name)):
                value = change_everywhere(getattr(found, name), change)
                object.__setattr__(changed, name, value)  # frozen ones too
            return changed
        return found

    return _change(tree, leaf)


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
