"""Memory that the system refuses, in words: Python, torch and the system each say it in a way of their own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from outcore.errors import OutcoreError, TierError

_OF_TORCH = ("can't allocate memory", "not enough memory")


def typed(error: BaseException, what: str) -> BaseException:
    """`TierError` in place of an error that says that there is no host memory for ``what``; others as they are."""
    if isinstance(error, OutcoreError) or not _is_refusal(error):
        return error
    reason = str(error).split("\n")[0] or "out of memory"
    told = TierError(
        errno.ENOMEM,
        f"the system refused host memory for {what} ({reason}); give the run a smaller host budget, or the process "
        "more memory (ulimit -v, its memory cgroup)",
    )
    told.__cause__ = error
    return told


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said_by_torch = isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_TORCH)
    return isinstance(error, MemoryError) or said_by_torch


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Also a decorator. Nothing of the user's may run within: what he can't allocate is his.

    Raises:
        TierError: the system refused host memory.
    """
    try:
        yield
    except Exception as error:
        told = typed(error, what)
        if told is error:
            raise
        raise told from error
