"""What one rank raised, as the others raise it: an error of the same class, with the same fields."""

from __future__ import annotations

import json
from typing import Any

from outcore import errors
from outcore.errors import BudgetError, OutcoreError, PeerError, TierError

_KINDS: dict[str, type[OutcoreError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OutcoreError) and kind not in (OutcoreError, PeerError)
}


def pack(error: Exception) -> bytes:
    """What is said of an error to the others; `raised` makes one of it."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    found: dict[str, Any] = {"kind": next(known, type(error).__name__), "text": str(error)}
    if isinstance(error, BudgetError):
        found["fields"] = [error.tier, error.needed, error.budget, error.remedy]
    elif isinstance(error, TierError):
        found["errno"] = error.errno
    return json.dumps(found).encode()


def raised(rank: int, doing: str, said: bytes) -> OutcoreError:
    """What to raise for what another rank raised: a `PeerError` if that was none of outcore's."""
    found = json.loads(said)
    kind, text = _KINDS.get(found["kind"]), found["text"]
    if kind is None:
        return PeerError(rank, doing, f"rank {rank} failed in {doing}: {found['kind']}: {text}")
    error = kind(*found.get("fields", [text]))
    error.args = (f"rank {rank}: {text}",)
    if isinstance(error, TierError):
        error.errno = found["errno"]
    return error
