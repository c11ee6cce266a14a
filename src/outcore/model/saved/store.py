"""What autograd saves in forward, kept in chunks until backward asks for it.

[Note: Who owns saved bytes]
When a block saves a tensor, its bytes are copied into a chunk of the pool, which from then on treats them like any
others: they count in the host's budget, go to the disk when what is used sooner needs the room, and are read ahead
for the unit's backward. Autograd gets a `Handle` in place of the tensor, so that the tensor itself lives as long as
forward needs it. An `Entry`, which handles share, owns the chunk: when the last handle goes (the node has run, or
the graph was dropped) the bytes are worth nothing, and the chunk is given back. Backward sees the chunk's bytes
through a storage; while that lives the chunk is pinned, whoever holds it. Autograd and the garbage collector let go
of things on any thread and at any moment, also in the middle of the pool's work, so they only put down what is
over; `SavedTensors.sweep`, which every use calls, gives it back.

[Note: What stays]
Parameters and buffers, which autograd sees as views of what stays anyway; tensors that are small; and tensors of
which the bytes don't say all.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from outcore.chunks.chunk import Chunk
from outcore.chunks.guards import Guard
from outcore.chunks.pool import Pool
from outcore.errors import ModelError
from outcore.model.owners import Owners
from outcore.model.readers import is_ours
from outcore.model.saved.carriers import Carrier
from outcore.model.saved.shelf import Shelf, Slot
from outcore.model.saved.views import Layout, Span, bytes_of, has_bytes, layout_in, spanned, to_store
from outcore.model.unit import Unit
from outcore.model.watched import Watched
from outcore.trace.meter import uncounted

SMALLEST = 64 << 10
"""Bytes from which on a saved tensor moves: below it a request costs more than what it frees is worth."""

SOON = 2
"""Ticks whose needs don't leave for what the next block will save."""


class Entry:
    """Bytes that are stored once; they go when the last handle does.

    Attributes:
        origin: the tensor that was saved, or the one that it is a view of; what counts its versions.
        shown: the storage in which backward sees them, while somebody does, from its byte ``first`` on.
    """

    __slots__ = ("__weakref__", "_over", "chunk", "first", "origin", "shown", "slot", "span", "version")

    def __init__(
        self, slot: Slot, chunk: Chunk, span: Span, tensor: torch.Tensor, over: deque[tuple[Slot, Chunk]]
    ) -> None:
        self.slot = slot
        self.chunk = chunk
        self.span = span
        self.origin = weakref.ref(_origin(tensor))
        self.version = tensor._version
        self.shown: weakref.ref[torch.UntypedStorage] | None = None
        self.first = 0
        self._over = over

    def __del__(self) -> None:
        self._over.append((self.slot, self.chunk))

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes are in it as they are now."""
        same = self.origin() is _origin(tensor) and self.version == tensor._version
        return same and self.span.holds(spanned(tensor))


class Kept(Watched):
    """A tensor that stays; autograd gets an alias, since the tensor itself may hold the node that saves it.

    Attributes:
        unit: whose parameter it is or shows, if it is one.
        unit_version: of that, when the tensor was saved.
    """

    def __init__(self, tensor: torch.Tensor, unit: Unit | None = None) -> None:
        self.tensor = tensor.detach()
        self.unit = unit
        self.unit_version = 0 if unit is None else unit.version
        super().__init__(self.tensor)


class Handle(Watched):
    """What autograd holds in place of a tensor that moved."""

    def __init__(self, entry: Entry, tensor: torch.Tensor) -> None:
        self.entry = entry
        self.layout: Layout = layout_in(tensor, entry.span)
        probe = tensor.detach()
        probe.data = tensor.new_empty(0)  # it shares the tensor's count of versions, and nothing else
        super().__init__(probe)


@dataclass
class Group:
    """What one call of a block saved, in order."""

    unit: Unit
    name: str
    entries: list[weakref.ref[Entry]] = field(default_factory=list)
    nbytes: int = 0

    def alive(self) -> list[Entry]:
        """What backward will still ask for, in the order in which it does."""
        return [entry for found in reversed(self.entries) if (entry := found()) is not None]


class SavedTensors:
    """Implements `outcore.model.saved.seam`. See [Note: Who owns saved bytes] and [Note: What stays].

    Args:
        carrier: copies between the device and the chunks.
        units: all of the model.
        owners: know whose parameters a tensor shows; those stay.
        buffers: yields the model's buffers, which stay.

    Attributes:
        read: told of a unit whose parameters a node of backward is about to read, and of its version then.
    """

    def __init__(
        self,
        carrier: Carrier,
        pool: Pool,
        device: torch.device,
        units: Sequence[Unit],
        owners: Owners,
        buffers: Callable[[], Iterator[torch.Tensor]],
    ) -> None:
        self._carrier = carrier
        self._pool = pool
        self._device = device
        self._units = units
        self._owners = owners
        self._buffers = buffers
        self._shelf = Shelf(carrier.place)
        self._groups: list[Group] = []
        self._known: dict[int, list[weakref.ref[Entry]]] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._over: deque[tuple[Slot, Chunk]] = deque()
        self._unseen: deque[Guard] = deque()
        self._staying: set[int] = set()
        self.read: Callable[[Unit, int], None] = lambda unit, version: None

    # -- forward ----------------------------------------------------------------------------------

    @contextmanager
    def call(self, unit: int, name: str) -> Iterator[None]:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and not is_ours(top):
            raise ModelError(
                f"the block {name} is called where other hooks take what it saves (a checkpoint around it, or "
                "save_on_cpu), so its activations can't be offloaded: leave those out, or let the block keep or "
                "recompute them"
            )
        self._groups = [group for group in self._groups if any(found() for found in group.entries)]
        self._staying = {buffer.untyped_storage()._cdata for buffer in self._buffers()}
        group = Group(self._units[unit], name)
        with saved_tensors_hooks(partial(self._pack, group), self._unpack):
            yield
        self._groups.append(group)
        self._carrier.turn()
        self._pool.make_ahead(group.nbytes, SOON)  # what the next block saves finds room, or writes under way

    def _pack(self, group: Group, tensor: torch.Tensor) -> Watched:
        self.sweep()
        if not self._moves(tensor):
            return Kept(tensor, self._owners.of(tensor))
        with uncounted():
            storage = tensor.untyped_storage()._cdata
            known = (found() for found in self._known.get(storage, ()))
            entry = next((e for e in known if e is not None and e.is_of(tensor)), None)
            return Handle(self._store(group, tensor) if entry is None else entry, tensor)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if not has_bytes(tensor) or tensor.device != self._device or tensor.numel() == 0:
            return False
        storage = tensor.untyped_storage()._cdata
        if to_store(tensor).nbytes < SMALLEST or storage in self._staying:
            return False
        return self._owners.of(tensor) is None

    def _store(self, group: Group, tensor: torch.Tensor) -> Entry:
        span, slot = to_store(tensor), (group.unit.index, len(group.entries))
        chunk = self._shelf.take(slot, f"{group.name} activations {slot[1] + 1}", span.nbytes)
        try:
            self._carrier.store(chunk, bytes_of(tensor, span))
        except BaseException:
            self._over.append((slot, chunk))
            raise
        entry = Entry(slot, chunk, span, tensor, self._over)
        group.entries.append(weakref.ref(entry))
        group.nbytes += chunk.nbytes
        self._remember(tensor.untyped_storage(), entry)
        return entry

    def _remember(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Let other views of a storage find what is stored of it, as long as it lives."""
        key = storage._cdata
        if key not in self._storages:
            known, storages = self._known, self._storages

            def gone(_: object) -> None:
                known.pop(key, None)
                storages.pop(key, None)

            self._storages[key] = weakref.ref(storage, gone)
        self._known.setdefault(key, []).append(weakref.ref(entry))

    # -- backward ---------------------------------------------------------------------------------

    def _unpack(self, held: Watched) -> torch.Tensor:
        held.check()
        if isinstance(held, Kept):
            if held.unit is not None:
                self.read(held.unit, held.unit_version)
            return held.tensor
        assert isinstance(held, Handle)
        self.sweep()
        entry = held.entry
        storage = None if entry.shown is None else entry.shown()
        with uncounted():
            if storage is None:
                storage = self._show(entry)
            return held.layout.of(storage, entry.first, self._device)

    def _show(self, entry: Entry) -> torch.UntypedStorage:
        try:
            stored, guard = self._carrier.show(entry.chunk, entry.span.nbytes)
        except BaseException:
            entry.chunk.error = None  # its traceback holds the graph, and the graph the chunk
            raise
        storage, entry.first = stored.untyped_storage(), int(stored.storage_offset())
        entry.shown = weakref.ref(storage)
        if guard is not None:
            # Not by the entry's own reference, which goes with it: a gradient may live longer.
            weakref.finalize(storage, self._unseen.append, guard).atexit = False
        return storage

    def expected(self, unit: Unit) -> tuple[Chunk, ...]:
        group = self._last(unit)
        return () if group is None else tuple(dict.fromkeys(entry.chunk for entry in group.alive()))

    def opened(self, unit: Unit) -> None:
        group = self._last(unit)
        if group is not None:
            before = self._groups[: self._groups.index(group)][-1:]
            for soon in (group, *before):
                self._carrier.lift([(entry.chunk, entry.span.nbytes) for entry in soon.alive()])

    def _last(self, unit: Unit) -> Group | None:
        """The unit's newest call that backward has still to do with."""
        for group in reversed(self._groups):
            if group.unit is unit and any(found() for found in group.entries):
                return group
        return None

    # -- the end ----------------------------------------------------------------------------------

    def sweep(self) -> None:
        while self._unseen:
            self._unseen.popleft().close()
        for _ in range(len(self._over)):
            slot, chunk = self._over.popleft()
            self._carrier.forget(chunk)
            if chunk.pins or chunk.moving:  # somebody looks at it still, or the disk does
                self._over.append((slot, chunk))
            else:
                self._pool.discard([chunk])
                self._shelf.put(slot, chunk)

    def shut(self) -> None:
        self._carrier.shut()
        self.sweep()


def _origin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that counts versions for this one."""
    base = tensor._base
    return tensor if base is None else base
