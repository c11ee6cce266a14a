"""Writes to parameters that nobody would keep.

[Note: Written in place]
An open parameter shows a copy of its master in the precision that computes, on tiers where nobody writes it back. So
what is written there would be lost, or not, as the budget has it. torch counts writes to a tensor, and a unit that
closes with other counts than it opened with says so. What is written through ``.data`` isn't counted.

A closed parameter shows one NaN for all its elements. Most writes to that raise by themselves; those that don't
(another tensor in its place, a constant that fills it) are seen when the unit opens or the next step comes. On a device
that NaN is not looked at: reading it would wait for all that the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outcore.errors import StateError
from outcore.model.closed import directly
from outcore.model.unit import Binding, Unit


class Writes:
    """Sees what is written to parameters; see [Note: Written in place]."""

    def __init__(self) -> None:
        self._versions: dict[Unit, list[int]] = {}

    def opened(self, unit: Unit) -> None:
        """Its parameters point at their values."""
        self._versions[unit] = [binding.parameter._version for binding in unit.bindings]

    def written(self, unit: Unit) -> StateError | None:
        """What to raise once the unit has closed, which it is about to."""
        pairs = zip(unit.bindings, self._versions.pop(unit), strict=True)
        name = next((b.name for b, version in pairs if b.parameter._version != version), None)
        if name is None:
            return None
        return StateError(
            f"{name} was changed in place where its values are only there to be read (clamp_ under no_grad, an "
            "embedding with max_norm, copy_ in outcore.gather): its master would never know; change it between steps, "
            "outcore.change(model, function)"
        )


def refuse_assigned(unit: Unit) -> None:
    """
    Raises:
        StateError: a parameter of a closed unit was given another tensor; it has its own again.
    """
    with directly():
        for binding in unit.bindings:
            if binding.parameter.data_ptr() != binding.resting.data_ptr():
                binding.parameter.data = binding.resting
                raise lost(binding)


def refuse_filled(units: Iterable[Unit], shown: Callable[[Binding], bool]) -> None:
    """
    Args:
        shown: whether a closed parameter may show its value; see `outcore.model.singles`.

    Raises:
        StateError: what a closed parameter shows was overwritten; it is a NaN again.
    """
    for unit in units:
        for binding in unit.bindings if not unit.opened else ():
            stands = binding.resting
            if stands.device.type != "cpu" or not stands.numel() or not stands.is_floating_point():
                continue
            value = stands.as_strided((), ())
            if not shown(binding) and not value.isnan():
                value.fill_(float("nan"))
                raise lost(binding)


def lost(binding: Binding) -> StateError:
    """What to raise for a write that nobody took."""
    return StateError(
        f"{binding.name} was written to while its values were elsewhere (p.data = ..., zero_, nn.init), so nothing "
        "became of it: change it between steps by outcore.change(model, function)"
    )
