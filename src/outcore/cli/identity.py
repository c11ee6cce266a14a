"""What must be the same for a run to go on: all that its losses depend on. Placement is not among it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import xxhash

from outcore.errors import UsageError

if TYPE_CHECKING:
    from outcore.cli.settings import Settings
    from outcore.integrations.transformers import Built

PIECE = 1 << 22
"""Tokens that are read at once for the digest."""

_FLAGS = (
    "seq_len",
    "batch_size",
    "accumulate",
    "optimizer",
    "clip",
    "precision",
    "seed",
    "microbatch",
    "logits",
)
_BEFORE = {"logits": "recompute"}
"""What runs did that did not say so yet."""
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "architectures"}
)
_NAMED = 3
"""Differences that one message names."""


def facts(settings: Settings, built: Built, lr: float) -> dict[str, Any]:
    """What the flags and the model say, before the data is read. JSON's own types only."""
    said = {flag: getattr(settings, flag) for flag in _FLAGS}
    return {"model": config_of(built), "flags": {**said, "optimizer": settings.optimizer.lower(), "lr": lr}}


def config_of(built: Built) -> dict[str, Any]:
    """The configuration of a model as JSON has it."""
    import json

    found: dict[str, Any] = json.loads(built.config.to_json_string(use_diff=False))
    return found


def facts_of_data(tokens: npt.NDArray[Any]) -> dict[str, Any]:
    """The number of tokens and their digest; shape (n,)."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(tokens), PIECE):
        digest.update(tokens[start : start + PIECE].astype("<u4").tobytes())
    return {"tokens": len(tokens), "digest": digest.hexdigest()}


def check_run(stored: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Check that a checkpoint is of this run, as far as the flags and the model tell.

    Raises:
        UsageError: it is not; names what differs.
    """
    model, flags = stored.get("model"), stored.get("flags")
    if not isinstance(model, dict) or not isinstance(flags, dict):
        raise UsageError(f"{path} was not written by outcore train: load it with outcore.load")
    found = [
        f"--{flag.replace('_', '-')} was {flags.get(flag, _BEFORE.get(flag))} and is {value} now"
        for flag, value in now["flags"].items()
        if flags.get(flag, _BEFORE.get(flag)) != value
    ]
    keys = sorted((model.keys() | now["model"].keys()) - _NOT_THE_MODEL)
    found += [
        f"the model's {key} was {_short(model.get(key))} and is {_short(now['model'].get(key))} now"
        for key in keys
        if model.get(key) != now["model"].get(key)
    ]
    _refuse(found, path)


def check_data(stored: Any, now: dict[str, Any], path: Path) -> None:
    """Check that a checkpoint is of the same tokens.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(stored, dict) or stored.get("tokens") != now["tokens"]:
        before = stored.get("tokens") if isinstance(stored, dict) else None
        _refuse([f"the data had {_short(before)} tokens and has {now['tokens']} now"], path)
    elif stored.get("digest") != now["digest"]:
        _refuse(["the text of the data has changed"], path)


def _refuse(found: list[str], path: Path) -> None:
    if found:
        more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
        raise UsageError(
            f"{path} is of another run: {'; '.join(found[:_NAMED])}{more}; give what it was to go on, or another "
            "--checkpoint to begin anew"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
