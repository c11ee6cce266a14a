"""What blocks offload in a step traced without values.

The same choice of what moves as in `outcore.model.saved.store`, the same places where memory of the device is let
go and taken as in `outcore.model.saved.device_carrier`. Where the host computes, what backward sees are the chunks
themselves, which the simulated pool holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from outcore.chunks.chunk import Chunk
from outcore.chunks.store import pages
from outcore.model.saved import store
from outcore.model.saved.views import Span, layout_in, spanned, to_store
from outcore.model.unit import Unit
from outcore.planning.recorder import Recorder


@dataclass(eq=False)
class _Entry:
    """Bytes stored once. ``held`` keeps them on a device, ``shown`` is what backward sees."""

    span: Span
    held: torch.Tensor | None = None
    shown: weakref.ref[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.span.nbytes


@dataclass(eq=False)
class _Group:
    """What one call of a block saved."""

    unit: int
    entries: list[weakref.ref[_Entry]] = field(default_factory=list)

    def alive(self) -> list[_Entry]:
        return [entry for found in self.entries if (entry := found()) is not None]


class TracedSaver:
    """Implements `outcore.model.saved.seam` for fake tensors.

    Args:
        recorder: told of what is stored.
        model: whose parameters and buffers stay.
        on_host: whether the host computes.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, on_host: bool) -> None:
        self._recorder = recorder
        self._model = model
        self._on_host = on_host
        self._groups: list[_Group] = []
        self._known: dict[tuple[int, int], list[weakref.ref[_Entry]]] = {}

    # -- forward ----------------------------------------------------------------------------------

    @contextmanager
    def call(self, unit: int, name: str) -> Iterator[None]:
        staying = {t.untyped_storage()._cdata for t in (*self._model.parameters(), *self._model.buffers())}
        group = _Group(unit)

        def pack(tensor: torch.Tensor) -> Any:
            moves = tensor.numel() > 0 and to_store(tensor).nbytes >= store.SMALLEST
            if not moves or tensor.untyped_storage()._cdata in staying:
                return tensor.detach()
            entry = self._entry(group, tensor)
            return entry, layout_in(tensor, entry.span)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        for before in self._groups[-1:]:
            for entry in before.alive():
                entry.held = None
        self._groups.append(group)

    def _entry(self, group: _Group, tensor: torch.Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        known = (found() for found in self._known.get(key, ()))
        entry = next((e for e in known if e is not None and e.span.holds(spanned(tensor))), None)
        if entry is None:
            entry = _Entry(to_store(tensor), None if self._on_host else tensor.detach())
            group.entries.append(weakref.ref(entry))
            if key not in self._known:
                weakref.finalize(storage, self._known.pop, key, None)
            self._known.setdefault(key, []).append(weakref.ref(entry))
            self._recorder.stored(group.unit, pages(entry.nbytes))
        return entry

    # -- backward ---------------------------------------------------------------------------------

    def _unpack(self, held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        entry, layout = held
        stored = self._show(entry)
        elements = entry.nbytes // layout.dtype.itemsize
        typed = stored[: elements * layout.dtype.itemsize].view(layout.dtype)
        return typed.as_strided(layout.shape, layout.strides, layout.offset)

    def _show(self, entry: _Entry) -> torch.Tensor:
        shown = None if entry.shown is None else entry.shown()
        if shown is None:
            shown = self._make(entry, counted=not self._on_host and entry.held is None)
            entry.shown = weakref.ref(shown)
        if entry.held is shown:
            entry.held = None  # it was lifted for this; what never left stays until the entry goes
        return shown

    def _make(self, entry: _Entry, counted: bool) -> torch.Tensor:
        with self._recorder.counting(counted):
            made = torch.empty(entry.nbytes, dtype=torch.uint8)
        if self._on_host:
            nbytes = pages(entry.nbytes)
            self._recorder.show(nbytes)
            weakref.finalize(made.untyped_storage(), self._recorder.show, -nbytes)
        return made

    def sweep(self) -> None:
        pass

    def expected(self, unit: Unit) -> tuple[Chunk, ...]:
        return ()

    def opened(self, unit: Unit) -> None:
        self._groups = [group for group in self._groups if group.alive()]
        found = next((k for k, g in reversed([*enumerate(self._groups)]) if g.unit == unit.index), None)
        if found is None or self._on_host:
            return
        for group in self._groups[max(0, found - 1) : found + 1]:
            for entry in group.alive():
                if entry.held is None and (entry.shown is None or entry.shown() is None):
                    entry.held = self._make(entry, counted=True)
                    entry.shown = weakref.ref(entry.held)

    def shut(self) -> None:
        pass
