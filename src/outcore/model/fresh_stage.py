"""Computing on a device whose memory can't be given back beneath a tensor: other tensors each time a unit is lifted.

On other devices a parameter's storage is emptied and filled again, so that all aliases follow it (see
`outcore.model.device_stage`). Where storages can't do that (XLA), a unit's parameters are new tensors after each lift,
one for each parameter, since a view would be a copy there. A frame is given back by forgetting them; that nobody else
holds them is a matter of `outcore.model.aliases`.

There are no streams either: a lift is over when it returns, and a use when its unit is closed, which is when the
device is told to run what is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from outcore.memory.device import NoStreams, offers
from outcore.memory.refusal import allocating_on_device
from outcore.model.aliases import Aliases
from outcore.model.device_stage import DeviceStage, Frame
from outcore.model.ranked_device_stage import RankedDeviceStage
from outcore.model.supply import Piece
from outcore.model.unit import Binding, Unit, resting
from outcore.trace.meter import uncounted


@dataclass(eq=False)
class FreshFrame(Frame):
    """Attributes:
    tensors: one per binding of the unit while it is here, else none. The list stays the same object.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)


class FreshStage(DeviceStage):
    """Frames of new tensors. Implements `outcore.model.stage.Stage`."""

    lasting = False

    def _frame(self, unit: Unit) -> FreshFrame:
        return FreshFrame(())

    def _fresh(self, unit: Unit) -> FreshFrame:
        frame = self._frames[unit]
        assert isinstance(frame, FreshFrame)
        return frame

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return self._fresh(unit).tensors

    def _copy_in(self, unit: Unit, frame: Frame) -> None:
        wanted = lift_bytes([unit])
        self._pool.borrow(wanted)
        try:
            found = self._lifted(unit)
        finally:
            self._pool.repay(wanted)
        self._fresh(unit).tensors[:] = [found[binding] for binding in unit.bindings]

    def _lifted(self, unit: Unit) -> dict[Binding, torch.Tensor]:
        """A new tensor for each parameter. One that lies in several pieces is put together on the host first."""
        found: dict[Binding, torch.Tensor] = {}
        parts: dict[Binding, torch.Tensor] = {}
        for piece in self._supply.pieces(unit):
            values, held = piece.take()
            try:
                with self._ledger.crossing("device in", piece.name, None, piece.nbytes), uncounted():
                    for binding in unit.bindings:
                        if binding.store is piece.store:
                            whole = _whole(binding, piece, values, parts)
                            if whole is not None:
                                found[binding] = self._brought(binding, whole)
            finally:
                held.close()
        return found

    def _brought(self, binding: Binding, whole: torch.Tensor) -> torch.Tensor:
        """A parameter's values, shape [elements], as a new tensor on the device."""
        assert isinstance(self._streams, NoStreams)
        with allocating_on_device(f"the parameter {binding.name}", whole.nbytes):
            tensor = whole.view(binding.slot.shape).to(self.device)
            self._streams.bring([tensor])
        return tensor

    def _free(self, unit: Unit) -> None:
        self._fresh(unit).tensors.clear()
        super()._free(unit)

    def resting(self, binding: Binding) -> torch.Tensor:
        """Where an expanded tensor takes all its bytes, all parameters of a shape have the same one."""
        shape, dtype = binding.slot.shape, binding.store.run.dtype
        if offers(self.device).storages:
            return resting(shape, dtype, self.device)
        for other in (b for unit in self._units for b in unit.bindings):
            if other is binding:
                break
            if other.slot.shape == shape and other.store.run.dtype == dtype:
                return other.resting
        self.occupy(shape.numel() * dtype.itemsize)
        return resting(shape, dtype, self.device)

    def hang(self, model: nn.Module) -> Sequence[Callable[[], None]]:
        parameters = [binding.parameter for unit in self._units for binding in unit.bindings]
        return [Aliases(parameters, self.device, offers(self.device).storages).around(model)]


class RankedFreshStage(FreshStage, RankedDeviceStage):
    """The same as one of several ranks. Implements `outcore.model.stage.Stage`."""


def lift_bytes(units: Sequence[Unit]) -> int:
    """Host bytes that a lift takes at most: the largest parameter once where it is put together, and its copy."""
    return max(
        (2 * b.slot.numel * b.store.run.dtype.itemsize for unit in units for b in unit.bindings), default=0
    )


def _whole(
    binding: Binding, piece: Piece, values: torch.Tensor, parts: dict[Binding, torch.Tensor]
) -> torch.Tensor | None:
    """A parameter's values, shape [elements], if with this piece they are all there.

    Args:
        values: the piece's, shape [stop - start].
        parts: parameters of which some pieces are missing.
    """
    slot, run = binding.slot, binding.store.run
    first, last = run.first + slot.offset, run.first + slot.offset + slot.numel
    low, high = max(first, piece.start), min(last, piece.stop)
    if low == first and high == last:
        return values[low - piece.start : high - piece.start]
    if low >= high:
        return None
    if binding not in parts:
        parts[binding] = torch.empty(slot.numel, dtype=run.dtype)
    part = parts[binding]
    part[low - first : high - first].copy_(values[low - piece.start : high - piece.start])
    return parts.pop(binding) if high == last else None
