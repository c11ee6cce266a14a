"""Memory that is refused, in words: Python, torch and the system each say it in a way of their own."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outcore.errors import DeviceError, OutcoreError, TierError

_OF_TORCH = ("can't allocate memory", "not enough memory")
_OF_XLA = "RESOURCE_EXHAUSTED"


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


@contextmanager
def allocating_on_device(what: str, nbytes: int) -> Iterator[None]:
    """The same for an accelerator's memory, of which so many bytes are asked for.

    Raises:
        DeviceError: the accelerator has no room for them.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _OF_XLA not in str(error):
            raise
        raise DeviceError(
            f"the device has no room for {what} ({nbytes:,} bytes): give the run a smaller device budget, which leaves "
            "more to the operators of the model and to other processes"
        ) from error
