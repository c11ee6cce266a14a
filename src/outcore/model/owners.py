"""Whose parameters a tensor shows, as long as they are there."""

from __future__ import annotations

import torch

from outcore.model.unit import Unit


class Owners:
    """Knows the storages in which the parameters of open units lie; no two units share one."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}

    def enter(self, unit: Unit) -> None:
        """The unit's parameters point at their values."""
        for binding in unit.bindings:
            self._units[binding.parameter.untyped_storage()._cdata] = unit

    def leave(self, unit: Unit) -> None:
        """They are about to point elsewhere."""
        for binding in unit.bindings:
            self._units.pop(binding.parameter.untyped_storage()._cdata, None)

    def of(self, tensor: torch.Tensor) -> Unit | None:
        """The open unit of which a tensor is a parameter, or a view of one."""
        try:
            return self._units.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or wrapped by a transform
            return None
