"""Computing on an accelerator: parameters are lifted to the device before use, gradients brought down after.

[Note: Streams]
Three streams: compute, copies in, copies out. A parameter frame is allocated, filled and freed on the copy-in
stream. The compute stream waits for the event after the fill; before the memory is freed the copy-in stream waits
for an event of the compute stream after the last use. So whatever the copy-in stream writes next into that memory
comes later than every kernel that read it. A gradient buffer belongs to the compute stream; the copy-out stream waits
for the event after it is filled, and the host lets it go only when it has seen the event after the copy down.

A frame's storage is resized to nothing and back, so that aliases saved by autograd follow it.

Frames hold whole runs. Whether this rank keeps all of it or others have slices is a matter of the `Supply` that a frame
is filled from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from outcore.chunks.chunk import Kind
from outcore.chunks.pool import Pool
from outcore.chunks.replacers import NEVER
from outcore.chunks.store import RunStore
from outcore.errors import BudgetError
from outcore.memory.device import Streams
from outcore.memory.ledger import Ledger
from outcore.memory.refusal import allocating_on_device
from outcore.model.descent import Descent
from outcore.model.stage import view
from outcore.model.supply import Held, Supply
from outcore.model.unit import Binding, Unit, resting
from outcore.trace.clock import Clock

AHEAD = 6
"""Uses of units for which they are lifted before they are asked for."""

AHEAD_TICKS = 256
"""Ticks among which those uses are looked for: there are updates between them."""


@dataclass(eq=False)
class Frame:
    """A unit's parameters on the device.

    Attributes:
        flats: one tensor per store; their storages are empty unless the unit is ``here``.
        filled: after the last fill; the compute stream waits for it.
        used: after the last use; freeing waits for it.
        spent: the values are not to be used again: it goes when the last use is over or room is needed. To free it at
            once would let copies that come after it on the stream wait for that use.
    """

    flats: tuple[torch.Tensor, ...]
    here: bool = False
    spent: bool = False
    filled: torch.Event | None = None
    used: torch.Event | None = None


class DeviceStage:
    """Frames within the device budget; see [Note: Streams]. Implements `outcore.model.stage.Stage`.

    Args:
        units: all units, in the order of their numbers.
        supply: what frames are filled from.
        budget: bytes of device memory for frames, gradient buffers and what the gauge sets aside.
    """

    lasting = True

    def __init__(
        self,
        device: torch.device,
        units: Sequence[Unit],
        pool: Pool,
        supply: Supply,
        descent: Descent,
        streams: Streams,
        clock: Clock,
        ledger: Ledger,
        budget: int,
        prefetch: bool,
    ) -> None:
        self.device = device
        self._units = units
        self._pool = pool
        self._supply = supply
        self._descent = descent
        self._streams = streams
        self._clock = clock
        self._ledger = ledger
        self._budget = budget
        self._reserved = 0
        self._ahead = 0
        self._occupied = 0
        self._prefetch = prefetch
        self._holds_idle = True
        self._frames = {unit: self._frame(unit) for unit in units}
        self._lifting: list[tuple[torch.Event, Held, int]] = []

    def _frame(self, unit: Unit) -> Frame:
        flats = []
        for store in unit.stores:
            with allocating_on_device(f"the parameters of {store.name}", store.run.entire.nbytes):
                flat = torch.empty(store.run.entire.numel, dtype=store.run.dtype, device=self.device)
            flat.untyped_storage().resize_(0)
            flats.append(flat)
        return Frame(tuple(flats))

    # -- budget -----------------------------------------------------------------------------------

    @property
    def pinned(self) -> int:
        """Bytes on the device that can't leave: open units and gradient buffers."""
        idle = sum(unit_bytes(u) for u, frame in self._frames.items() if frame.here and u.opened == 0)
        return self._used - idle

    @property
    def _used(self) -> int:
        """Bytes of frames, gradient buffers and what always stays."""
        frames = sum(unit_bytes(u) for u, frame in self._frames.items() if frame.here)
        return frames + self._descent.held + self._occupied

    def occupy(self, nbytes: int) -> None:
        self._make_room(nbytes)
        self._occupied += nbytes
        self._ledger.hold("device", nbytes)

    def reserve(self, nbytes: int, ahead: int) -> None:
        """Set device memory aside for activations; frames that don't fit beside them leave.

        The caller enters the bytes in the ledger.

        Args:
            nbytes: needed now.
            ahead: needed soon: frames lifted ahead stay clear of it.
        """
        self._reserved, self._ahead = nbytes, max(nbytes, ahead)
        if not self._try_room(0, -1):
            self._descent.drain()  # gradient buffers whose copies are still under way
            self._try_room(0, -1)

    def hold_idle(self, on: bool) -> None:
        """Whether frames may stay after their use, and come before it."""
        self._holds_idle = on
        if not on:
            for unit, frame in self._frames.items():
                if frame.here and unit.opened == 0:
                    self._free(unit)

    def _make_room(self, nbytes: int) -> None:
        if self._try_room(nbytes, -1):
            return
        self._descent.drain()
        if not self._try_room(nbytes, -1):
            raise BudgetError(
                "device",
                self._used + self._reserved + nbytes,
                self._budget,
                f"{self._reserved:,} bytes are set aside for activations: give the device more, use a smaller "
                "batch, recomputation or smaller units",
            )

    def _try_room(self, nbytes: int, beyond: int) -> bool:
        while self._used + self._reserved + nbytes > self._budget:
            victim, furthest = None, beyond
            for unit, frame in self._frames.items():
                if frame.here and unit.opened == 0:
                    distance = self._next_use(unit)
                    if distance > furthest:
                        victim, furthest = unit, distance
            if victim is None:
                return False
            self._free(victim)
        return True

    def _next_use(self, unit: Unit) -> int:
        """Ticks until what is on the device of a unit is used again: as far as any of its chunks tells."""
        if self._frames[unit].spent or not unit.parameter_chunks:
            return NEVER
        return self._clock.next_use(unit.parameter_chunks[0])

    # -- frames -----------------------------------------------------------------------------------

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        flat_of = dict(zip(unit.stores, self._frames[unit].flats, strict=True))
        return [view(flat_of[b.store], b, b.store.run.first) for b in unit.bindings]

    def open(self, unit: Unit) -> None:
        self._supply.open(unit)
        frame = self._frames[unit]
        if not self._is_here(unit):
            self._make_room(unit_bytes(unit))
            self._lift(unit)
        self._supply.lifted(unit)
        self._await_fill(frame)
        self._look_ahead()

    def close(self, unit: Unit) -> None:
        frame = self._frames[unit]
        frame.used = self._streams.record(self._streams.compute)
        frame.spent = not self._supply.lasting
        if not self._holds_idle:
            self._free(unit)
        self._supply.close(unit)
        self._look_ahead()

    def _is_here(self, unit: Unit) -> bool:
        """Whether a unit's values are on the device, and are those of its next use."""
        frame = self._frames[unit]
        if frame.spent:
            self._free(unit)
        return frame.here

    def stale(self, unit: Unit) -> None:
        if any(store.run.trained for store in unit.stores):
            self.replaced(unit)

    def replaced(self, unit: Unit) -> None:
        if self._frames[unit].here:
            self._free(unit)
        self._supply.changed(unit)

    def _lift(self, unit: Unit) -> None:
        """Copy a unit's parameters to the device; one that can't be brought whole is not there."""
        frame = self._frames[unit]
        frame.here = True
        self._ledger.hold("device", unit_bytes(unit), Kind.PARAMETER.value)
        try:
            self._copy_in(unit, frame)
        except BaseException:
            self._free(unit)
            raise

    def _copy_in(self, unit: Unit, frame: Frame) -> None:
        """Fill a frame piece by piece on the copy-in stream."""
        stream = self._streams.copy_in
        flat_of = dict(zip(unit.stores, frame.flats, strict=True))
        for store, flat in flat_of.items():
            nbytes = store.run.entire.nbytes
            with allocating_on_device(f"the parameters of {store.name}", nbytes), stream:
                flat.untyped_storage().resize_(nbytes)
        for piece in self._supply.pieces(unit):
            self._settle(piece.nbytes)
            values, held = piece.take()
            with ExitStack() as undo:
                undo.callback(held.close)
                with self._ledger.crossing("device in", piece.name, stream, piece.nbytes), stream:
                    flat_of[piece.store][piece.start : piece.stop].copy_(values, non_blocking=True)
                self._lifting.append((self._streams.record(stream), held, piece.nbytes))
                undo.pop_all()
        frame.filled = self._streams.record(stream)

    def _settle(self, nbytes: int) -> None:
        """Unpin what has been copied, and let no more than a share of the host be pinned by copies."""
        while self._lifting and self._lifting[0][0].query():
            self._lifting.pop(0)[1].close()
        bound = max(self._pool.ceiling // 4, nbytes)
        while self._lifting and sum(n for _, _, n in self._lifting) + nbytes > bound:
            event, held, _ = self._lifting.pop(0)
            self._await_lift(event)
            held.close()

    def _settle_all(self) -> None:
        """Wait for all copies in."""
        while self._lifting:
            event, held, _ = self._lifting.pop(0)
            self._await_lift(event)
            held.close()

    def _free(self, unit: Unit) -> None:
        frame = self._frames[unit]
        stream = self._streams.copy_in
        self._await_use(frame)
        for flat in frame.flats:
            with stream:
                flat.untyped_storage().resize_(0)
        frame.here, frame.spent, frame.filled, frame.used = False, False, None, None
        self._ledger.hold("device", -unit_bytes(unit), Kind.PARAMETER.value)

    def _look_ahead(self) -> None:
        """Lift units needed soon, as far as their chunks are on the host and nothing needed sooner must leave."""
        self._settle(0)
        self._descent.poll()
        for unit, frame in self._frames.items():
            if frame.spent and frame.used is not None and frame.used.query():
                self._free(unit)
        if not (self._prefetch and self._holds_idle):
            return
        beside = self._ahead - self._reserved
        near = True
        for distance, phase, unit in self._coming():
            if near and phase == "backward":
                beside += self._gradient_room(unit)
            near = False
            if self._is_here(unit):
                continue
            if not self._supply.ready(unit):
                return
            if not self._try_room(unit_bytes(unit) + beside, distance):
                return
            self._lift(unit)

    def _coming(self) -> Iterator[tuple[int, str, Unit]]:
        """The next uses of units: ticks until then, forward or backward, and the unit."""
        uses = 0
        for distance, key in self._clock.upcoming(AHEAD_TICKS):
            assert isinstance(key, tuple)
            if key[0] in ("forward", "backward"):
                yield distance, key[0], self._units[key[1]]
                uses += 1
            if uses == AHEAD or key[0] == "read":
                return

    def _gradient_room(self, following: Unit) -> int:
        """Bytes of the next gradient buffer, of a unit that is open or of the one that follows.

        It comes beside those still on their way down, and must not push out what was lifted ahead.
        """
        near = [unit for unit in self._units if unit.opened] + [following]
        return max(
            sum(self._descent.room(s) for s in self._landing(unit) if not self._descent.has_buffer(s))
            for unit in near
        )

    # -- the waits, one by one --------------------------------------------------------------------

    def _await_fill(self, frame: Frame) -> None:
        """Compute after the copy in."""
        if frame.filled is not None:
            compute = self._streams.compute
            with self._ledger.doing("device waiting", "device in", compute):
                compute.wait_event(frame.filled)
            frame.filled = None

    def _await_use(self, frame: Frame) -> None:
        """Free, and so overwrite, after the last kernel."""
        if frame.used is not None:
            self._streams.copy_in.wait_event(frame.used)

    def _await_lift(self, event: torch.Event) -> None:
        """Let the host have its chunk back after the copy out of it."""
        with self._ledger.waiting("device in"):
            event.synchronize()

    # -- gradients --------------------------------------------------------------------------------

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        nbytes = self._descent.room_for(binding, gradient)
        if nbytes:
            self._descent.poll()  # a buffer that has come down goes before the next one comes
            self._make_room(nbytes)
        self._descent.collect(binding, gradient)

    def _landing(self, unit: Unit) -> Sequence[RunStore]:
        """The runs that gradients of a unit come down to."""
        return [store for store in unit.stores if store.run.trained]

    def gradients_complete(self, unit: Unit) -> None:
        for store in self._landing(unit):
            self._descent.send(store)

    def backward_over(self) -> None:
        pass

    def settle_gradients(self) -> None:
        self.synchronize()

    def collected(self) -> set[int]:
        return set()

    def forget_gradients(self) -> None:
        self.synchronize()

    def anticipate(self) -> None:
        self._look_ahead()

    def synchronize(self) -> None:
        """Wait for all copies: afterwards the host may change what they read."""
        self._descent.drain()
        self._settle_all()

    def resting(self, binding: Binding) -> torch.Tensor:
        return resting(binding.slot.shape, binding.store.run.dtype, self.device)

    def hang(self, model: nn.Module) -> Sequence[Callable[[], None]]:
        return ()

    def shut(self) -> None:
        try:
            self.synchronize()
            self._streams.finish()
            for unit, frame in self._frames.items():
                if frame.here:
                    self._free(unit)
        finally:
            self._supply.shut()
            self._ledger.hold("device", -self._occupied)
            self._occupied = 0


def unit_bytes(unit: Unit) -> int:
    """Bytes of a unit's frame: its parameters without padding to pages."""
    return sum(store.run.entire.nbytes for store in unit.stores)
