"""Gradients on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from outcore.chunks.chunk import Kind
from outcore.chunks.layout import Slot
from outcore.chunks.pool import Guard, Pool
from outcore.chunks.store import RunStore
from outcore.memory.device import Streams
from outcore.memory.ledger import Ledger
from outcore.memory.pinned import PinnedMemory
from outcore.memory.refusal import allocating_on_device
from outcore.model.unit import Binding
from outcore.optim.gradients import Gradients
from outcore.trace.meter import uncounted


@dataclass(eq=False)
class _Buffer:
    """A run's gradients on the device, in one piece; zero where a parameter has none.

    They are in the run's dtype, or in fp32 if one of them is summed over slices.

    Attributes:
        holders: who still needs the values: the copies that have not landed, and whoever begins more of them.
    """

    values: torch.Tensor
    slots: dict[int, Slot] = field(default_factory=dict)
    holders: int = field(default=0, init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = self.values.dtype


@dataclass(eq=False)
class _Landing:
    """One chunk's copy down: into its gradient chunk under a guard, or into memory beside it to be added."""

    store: RunStore
    k: int
    slots: tuple[Slot, ...]
    buffer: _Buffer
    guard: Guard | None
    beside: torch.Tensor | None
    arrived: torch.Event = field(init=False)

    @property
    def target(self) -> torch.Tensor:
        """Where the copy lands, shape [elements]; a chunk's is valid while its guard is open."""
        wide = self.buffer.dtype is not self.store.run.dtype
        if self.beside is not None:
            return self.beside.view(self.buffer.dtype)
        return self.store.total(self.k) if wide else self.store.gradient(self.k)

    @property
    def nbytes(self) -> int:
        start, stop = self.store.run.extent(self.k)
        return (stop - start) * self.buffer.dtype.itemsize


class Descent:
    """Buffers, copies and arrivals. Copies land in the order in which they were sent.

    Args:
        device: where gradients come from.
        pinned: memory beside the gradient chunks, for contributions that are added.
        landed: called when all gradients of a run that were sent have arrived.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        gradients: Gradients,
        pool: Pool,
        pinned: PinnedMemory,
        ledger: Ledger,
        landed: Callable[[RunStore], None],
    ) -> None:
        self._device = device
        self._streams = streams
        self._gradients = gradients
        self._pool = pool
        self._pinned = pinned
        self._ledger = ledger
        self._landed = landed
        self._buffers: dict[RunStore, _Buffer] = {}
        self._landing: list[_Landing] = []
        self._held = 0
        self._widths: dict[RunStore, torch.dtype] = {}

    @property
    def held(self) -> int:
        """Bytes of gradient buffers on the device."""
        return self._held

    def _hold(self, nbytes: int) -> None:
        self._held += nbytes
        self._ledger.hold("device", nbytes, Kind.GRADIENT.value)

    def has_buffer(self, store: RunStore) -> bool:
        return store in self._buffers

    def room(self, store: RunStore) -> int:
        """Bytes of the next buffer for a run, if it is as the last one was."""
        return store.run.numel * self._widths.get(store, store.run.dtype).itemsize

    def room_for(self, binding: Binding, gradient: torch.Tensor) -> int:
        """Bytes that `collect` will take."""
        buffer = self._buffers.get(binding.store)
        wanted = binding.store.run.numel * gradient.dtype.itemsize
        if buffer is None or binding.slot.index in buffer.slots:
            return wanted
        return wanted if wanted > buffer.values.nbytes else 0

    def collect(self, binding: Binding, gradient: torch.Tensor) -> None:
        """Copy a gradient into its run's buffer, on the compute stream.

        Args:
            gradient: in the run's dtype, or in fp32.

        Raises:
            DeviceError: the device has no memory for the buffer.
        """
        store, slot = binding.store, binding.slot
        buffer = self._buffers.get(store)
        if buffer is not None and slot.index in buffer.slots:
            self.send(store)  # a second contribution in one pass: it is added on the host
            buffer = None
        if buffer is None or gradient.dtype.itemsize > buffer.dtype.itemsize:
            what, nbytes = f"the gradients of {store.name}", store.run.numel * gradient.dtype.itemsize
            with uncounted(), allocating_on_device(what, nbytes):  # the stage counts it
                values = torch.zeros(store.run.numel, dtype=gradient.dtype, device=self._device)
            self._hold(values.nbytes)
            slots = {}
            if buffer is not None:  # what is there is in the run's dtype
                values.copy_(buffer.values)
                self._hold(-buffer.values.nbytes)
                slots = buffer.slots
            buffer = self._buffers[store] = _Buffer(values, slots)
            self._widths[store] = buffer.dtype
        buffer.values[slot.offset : slot.offset + slot.numel].view(slot.shape).copy_(gradient)
        buffer.slots[slot.index] = slot

    def send(self, store: RunStore) -> None:
        """Start the copy of a run's gradients to the host."""
        buffer = self._buffers.pop(store, None)
        if buffer is None:
            return
        buffer.holders = 1  # the first of its copies may land before the last has begun
        try:
            self._await_gradients()
            for k in range(store.run.chunks):
                self._send(store, k, buffer)
        finally:
            self._let_go(store, buffer)
        self.poll()

    def _send(self, store: RunStore, k: int, buffer: _Buffer) -> None:
        """Start the copy of one chunk."""
        start, stop = store.run.extent(k)
        nbytes, stream = (stop - start) * buffer.dtype.itemsize, self._streams.copy_out
        self._bound(nbytes)
        slots = tuple(s.slot for s in store.run.segments(k) if s.slot.index in buffer.slots)
        if not slots:
            return
        with ExitStack() as undo:
            guard = self._gradients.open_first(store, k, buffer.dtype is not store.run.dtype)
            beside = None
            if guard is not None:
                undo.callback(guard.close)
            else:
                self._pool.borrow(nbytes)
                undo.callback(self._pool.repay, nbytes)
                beside = self._pinned.take(nbytes)
                undo.callback(self._pinned.put, beside)
            landing = _Landing(store, k, slots, buffer, guard, beside)
            with self._ledger.crossing("device out", store.gradients[k].name, stream, nbytes), stream:
                landing.target.copy_(buffer.values[start:stop], non_blocking=True)
            landing.arrived = self._streams.record(stream)
            self._landing.append(landing)
            buffer.holders += 1
            undo.pop_all()

    def arrive(self, stores: Collection[RunStore]) -> None:
        """Wait for the gradients of some runs."""
        wanted = set(stores)
        for store in [store for store in self._buffers if store in wanted]:
            self.send(store)
        while any(landing.store in wanted for landing in self._landing):
            self._wait_for_first()

    def poll(self) -> None:
        """Take what has arrived, without waiting."""
        while self._landing and self._landing[0].arrived.query():
            self._land(self._landing.pop(0))

    def drain(self) -> None:
        """Wait for everything on its way."""
        for store in list(self._buffers):
            self.send(store)
        while self._landing:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        landing = self._landing.pop(0)
        self._await_arrival(landing)
        self._land(landing)

    # -- the waits, one by one --------------------------------------------------------------------

    def _await_gradients(self) -> None:
        """Copy down after the kernels that fill the buffer."""
        self._streams.copy_out.wait_event(self._streams.record(self._streams.compute))

    def _await_arrival(self, landing: _Landing) -> None:
        """Let the host read, and the buffer go, after the copy down."""
        with self._ledger.waiting("device out"):
            landing.arrived.synchronize()

    def _bound(self, nbytes: int) -> None:
        """Let what is on its way pin no more than a share of the host."""
        bound = self._pool.ceiling // 4
        while self._landing and sum(x.nbytes for x in self._landing) + nbytes > bound:
            self._wait_for_first()

    def _land(self, landing: _Landing) -> None:
        store, k = landing.store, landing.k
        try:
            if landing.guard is not None:
                landing.guard.close()
                self._gradients.filled(store, k, landing.slots)
            elif landing.beside is not None:
                try:
                    self._gradients.add_whole(store, k, landing.target, landing.slots)
                finally:
                    self._pinned.put(landing.beside)
                    self._pool.repay(landing.beside.numel())
        finally:
            self._let_go(store, landing.buffer)

    def _let_go(self, store: RunStore, buffer: _Buffer) -> None:
        """One holder less: the last one's copy has landed, so nothing reads the values any more."""
        buffer.holders -= 1
        if buffer.holders == 0:
            self._hold(-buffer.values.nbytes)
            del buffer.values
            self._landed(store)
