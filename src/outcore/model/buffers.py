"""Buffers that a block's forward changes, where that forward is computed again.

[Note: State in a forward]
Batch norm counts and averages what passes, spectral norm goes on with its iteration: such a forward changes buffers and
reads what the one before left there. To recompute it is to change them twice, and to compute something else. So what
small buffers were before a call is kept with what the checkpoint keeps; the recomputation begins with that, and leaves
the buffers as it found them. A larger buffer isn't copied at each call, as most never change (a mask): if one does, the
block is refused.

Values are copied through ``.data``, for autograd counts no change then: it may have saved a buffer, and a kernel that
changes one (that of batch norm) tells nobody either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from outcore.errors import ModelError

SMALL = 64 << 10
"""The most bytes of a buffer that is copied at each call."""

Places = Sequence[tuple[nn.Module, str]]
"""Whose buffers, and their names there."""

Copies = list[tuple[nn.Module, str, torch.Tensor | None, torch.Tensor | None]]
"""The same, with the tensors and copies of their values; ``None`` where there is none yet."""


def places_of(block: nn.Module) -> Places:
    """The buffers of a block, the same one once, and where there may be one later."""
    found: dict[object, tuple[nn.Module, str]] = {}
    for module in block.modules():
        for name, buffer in module._buffers.items():
            found.setdefault((id(module), name) if buffer is None else id(buffer), (module, name))
    return list(found.values())


class CallBuffers:
    """The buffers of one call of a block; see [Note: State in a forward].

    Args:
        block: its name, for messages.
        places: from `places_of`.
    """

    def __init__(self, block: str, places: Places) -> None:
        self._block = block
        self._places = places
        self._before: Copies | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the block's forward runs, for the first time or again.

        Raises:
            ModelError: it changed a large buffer.
        """
        if self._before is not None:
            later = _copies(self._places)
            _put(self._before)
            try:
                yield
            finally:  # a recomputation is stopped where no more of it is needed
                _put(later)
            return
        self._before = _copies(self._places)
        large = [
            (name, found, found._version) for _, name, found in _there(self._places) if not _is_small(found)
        ]
        yield
        for name, found, version in large:
            if found._version != version:
                raise ModelError(
                    f"{self._block} changes its buffer {name} of {found.nbytes:,} bytes in its forward, so it can't be "
                    "recomputed: let it keep its activations, Activations(units={...: 'keep'})"
                )


@contextmanager
def untouched(places: Places) -> Iterator[None]:
    """Inside, a forward runs that is none; afterwards the buffers are what they were before, however large."""
    before = _copies(places, lambda buffer: True)
    try:
        yield
    finally:
        _put(before)


def _there(places: Places) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module, name in places:
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield module, name, buffer


def _is_small(buffer: torch.Tensor) -> bool:
    return buffer.nbytes <= SMALL


def _copies(places: Places, copied: Callable[[torch.Tensor], bool] = _is_small) -> Copies:
    found: Copies = []
    for module, name in places:
        buffer = module._buffers.get(name)
        if buffer is None:
            found.append((module, name, None, None))
        elif copied(buffer):
            found.append((module, name, buffer, buffer.detach().clone()))
    return found


def _put(copies: Copies) -> None:
    for module, name, buffer, copy in copies:
        if buffer is not None and copy is not None:
            buffer.data.copy_(copy)
        module._buffers[name] = buffer
