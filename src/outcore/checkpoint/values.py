"""Plain values as JSON, so that they come back as they were: tuples, infinities, tensors, keys that are no strings.

JSON's own types stand for themselves. Everything else is an object with one key that begins with ``$``:
``{"$tuple": [...]}``, ``{"$float": "inf"}``, ``{"$tensor": "state.3"}``, ``{"$dict": [[key, value], ...]}``,
``{"$counter": [[key, count], ...]}``. No class is ever looked up by a name that a file gives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from outcore.errors import CheckpointError, UsageError

Put = Callable[[torch.Tensor], str]
Get = Callable[[str], torch.Tensor]


def encode(value: object, put: Put, where: str) -> Any:
    """What JSON can hold of a value.

    Args:
        value: numbers, strings, booleans, ``None``, tensors, and lists, tuples and dicts of these.
        put: keeps a tensor elsewhere and says under which key.
        where: the value's name, for messages.

    Raises:
        UsageError: it holds anything else.
    """
    try:
        return _encode(value, put, where)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be saved, or holds itself") from None


def _encode(value: object, put: Put, where: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return {"$tensor": put(value)}
    if isinstance(value, list):
        return [_encode(item, put, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, put, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if isinstance(value, Counter) or not all(type(k) is str and not k.startswith("$") for k in value):
            pairs = [
                [_encode(k, put, f"a key of {where}"), _encode(v, put, f"{where}[{k!r}]")]
                for k, v in value.items()
            ]
            return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
        return {k: _encode(v, put, f"{where}[{k!r}]") for k, v in value.items()}
    raise UsageError(
        f"{where} is a {type(value).__qualname__}, which can't be saved: only numbers, strings, booleans, None, "
        "tensors, and lists, tuples and dicts of these can"
    )


def decode(value: Any, get: Get) -> Any:
    """The value that `encode` was given.

    Raises:
        CheckpointError: ``value`` is nothing that `encode` makes.
    """
    try:
        return _decode(value, get)
    except (RecursionError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the manifest holds a value that can't be read: {error}") from None


def _decode(value: Any, get: Get) -> Any:
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, get) for key, item in value.items()}
    if len(value) != 1:
        raise CheckpointError("the manifest holds a value with more than one tag")
    [(tag, content)] = value.items()
    if tag == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "$tensor" and isinstance(content, str):
        return get(content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(_decode(item, get) for item in content)
    if tag in ("$dict", "$counter") and isinstance(content, list):
        pairs = {_decode(key, get): _decode(item, get) for key, item in content}
        return pairs if tag == "$dict" else _counter(pairs)
    raise CheckpointError(f"the manifest holds a value with the unknown tag {tag!r}")


def _counter(pairs: dict[Any, Any]) -> Counter[Any]:
    if not all(type(count) is int for count in pairs.values()):
        raise CheckpointError("the manifest holds a counter of something else than numbers")
    return Counter(pairs)
