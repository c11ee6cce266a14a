"""What a step allocates besides chunks: activations, temporaries and gradients on their way.

[Note: Rehearsal]
The first lap of each kind runs under a dispatch mode that charges every storage once, when it first appears
as an output, and credits it when it is freed (`docs/limits.md` says what it can't see). Laps known already run
without it. The mode sees every operator's arguments too, so it also finds a parameter that is used outside
the module that owns it, which would otherwise read as NaN.

[Note: Left behind]
Torch keeps a mode that was entered until it is left, and no call ends the lap of a model that is dropped. So a meter
keeps nobody alive whom it tells. Once they are gone, or it was retired, it counts nothing and lets operators pass, and
it leaves the stack when it is on top of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that operators create on one device while it is active.

    Args:
        device: the device whose storages are counted.
        visit: called with the storage of each tensor argument, by the number that torch knows it by.
        observe: called with the live bytes at each new peak.

    Whose methods ``visit`` and ``observe`` are is not kept alive: see [Note: Left behind].
    """

    def __init__(
        self, device: torch.device, visit: Callable[[int], None], observe: Callable[[int], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._visit = _loosely(visit)
        self._observe = _loosely(observe)
        self._entered = self._retired = self._inference = False
        self._charged: set[int] = set()
        self._live = 0
        self._window = 0
        self._peak = 0

    def __enter__(self) -> Any:
        clear_away()
        self._inference = torch.is_inference_mode_enabled()
        self._entered = True
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._entered = False
        clear_away()

    def retire(self) -> None:
        """Count no more: the lap is over, though the meter may still be on a stack."""
        self._retired = True

    def is_left_behind(self) -> bool:
        """Whether it counts no more and can be left where this is called."""
        silent = self._retired or self._visit() is None or self._observe() is None
        return (
            silent
            and self._entered
            and self._inference == torch.is_inference_mode_enabled()
            and torch._C._current_graph_task_id() == -1  # after a node, the stack is what it was before it
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        visit, observe = self._visit(), self._observe()
        if self._retired or visit is None or observe is None:
            return func(*args, **kwargs)
        incoming = set()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and _has_storage(leaf):
                storage = leaf.untyped_storage()
                incoming.add(storage._cdata)
                visit(storage._cdata)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device and _has_storage(leaf):
                storage = leaf.untyped_storage()
                if storage._cdata not in incoming and storage._cdata not in self._charged:
                    self._charge(storage, observe)
        return result

    def _charge(self, storage: torch.UntypedStorage, observe: Callable[[int], None]) -> None:
        nbytes = storage.nbytes()
        self._charged.add(storage._cdata)
        self._live += nbytes
        weakref.finalize(storage, self._credit, storage._cdata, nbytes)  # also where the peak is refused
        self._window = max(self._window, self._live)
        if self._live > self._peak:
            self._peak = self._live
            observe(self._live)

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


def clear_away(gone: object = None) -> None:
    """Take meters that were left behind from the top of this thread's stack."""
    while True:
        modes = _get_current_dispatch_mode_stack()
        if not modes or not isinstance(modes[-1], Meter) or not modes[-1].is_left_behind():
            return
        modes[-1].__exit__(None, None, None)


def _loosely(told: Callable[[int], None]) -> Callable[[], Callable[[int], None] | None]:
    """What gives the callable, or nothing once the object whose method it is has gone."""
    return weakref.WeakMethod(told, clear_away) if isinstance(told, MethodType) else lambda: told


def uncounted() -> AbstractContextManager[Any]:
    """What is allocated inside is entered in the ledger by whoever does so: a meter must not add it once more."""
    return _disable_current_modes()


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
