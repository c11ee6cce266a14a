"""Memory that runs out when told to: the N-th allocation that outcore's own code asks for by name.

What a model allocates while it computes is the user's and not counted, nor is what the interpreter needs for small
objects.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

import outcore
from outcore.checkpoint import reader

OURS = str(Path(outcore.__file__).parent) + os.sep


def torch_refuses(*_: Any) -> NoReturn:
    raise RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"
    )


def python_refuses(*_: Any) -> NoReturn:
    raise MemoryError


def system_refuses(*_: Any) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


NAMES: tuple[tuple[Any, str, Callable[..., NoReturn]], ...] = (
    *((torch, name, torch_refuses) for name in ("empty", "zeros", "full", "cat", "empty_like")),
    *((torch.Tensor, name, torch_refuses) for name in ("clone", "contiguous", "float", "to")),
    (np, "empty", python_refuses),
    (mmap, "mmap", system_refuses),
    (reader, "bytearray", python_refuses),
)
"""Who allocates, under which name, and how it says that there is no memory."""


class Allocations:
    """Counts allocations; the ``at``-th fails, or that and all later ones."""

    def __init__(self, at: int = 0, forever: bool = False) -> None:
        self.count = 0
        self._at = at
        self._forever = forever
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        """Count one, and say whether it is to fail."""
        with self._lock:
            self.count += 1
            return self.count == self._at or (self._forever and 0 < self._at < self.count)

    @contextmanager
    def counted(self) -> Iterator[Allocations]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, refuse in NAMES:
                real = getattr(owner, name, None) or getattr(__builtins__, name, bytearray)
                patch.setattr(owner, name, self._stand_in(real, refuse), raising=False)
            yield self

    def _stand_in(self, real: Any, refuse: Callable[..., NoReturn]) -> Any:
        def allocate(*args: Any, **more: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(OURS) and self.strikes():
                refuse()
            return real(*args, **more)

        return allocate
