"""What a step allocates besides chunks: activations, temporaries and gradients on their way.

[Note: Rehearsal]
The first lap of each kind runs under a dispatch mode that charges every storage once, when it first appears
as an output, and credits it when it is freed (`docs/limits.md` says what it can't see). Laps known already run
without it. The mode sees every operator's arguments too, so it also finds a parameter that is used outside
the module that owns it, which would otherwise read as NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operators create on one device while it is active.

    Args:
        device: the device whose storages are counted.
        visit: called with the storage of each tensor argument, by the number that torch knows it by.
        observe: called with the live bytes at each new peak.
    """

    def __init__(
        self, device: torch.device, visit: Callable[[int], None], observe: Callable[[int], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._visit = visit
        self._observe = observe
        self._charged: set[int] = set()
        self._live = 0
        self._window = 0
        self._peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        incoming = set()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and _has_storage(leaf):
                storage = leaf.untyped_storage()
                incoming.add(storage._cdata)
                self._visit(storage._cdata)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device and _has_storage(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in incoming and storage._cdata not in self._charged:
                    self._charge(storage)
        return result

    def _charge(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        self._charged.add(storage._cdata)
        self._live += nbytes
        self._window = max(self._window, self._live)
        if self._live > self._peak:
            self._peak = self._live
            self._observe(self._live)
        weakref.finalize(storage, self._credit, storage._cdata, nbytes)

    def take_window(self) -> int:
        """The peak since the last call."""
        peak, self._window = self._window, self._live
        return peak

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._live

    def _credit(self, key: int, nbytes: int) -> None:
        self._charged.discard(key)
        self._live -= nbytes


def uncounted() -> AbstractContextManager[Any]:
    """What is allocated inside is entered in the ledger by whoever does so: a meter must not add it once more."""
    return _disable_current_modes()


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
