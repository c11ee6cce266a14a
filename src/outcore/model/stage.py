"""Where a unit's parameters are while its module runs, and where its gradients land.

[Note: Stable addresses]
Autograd saves aliases of parameters in forward and reads them in backward. Whatever is released in
between must come back at the address it had. On the host every run has its own range of addresses for good;
pages come and go beneath it. (On an accelerator the same is done with resizable storages: see
`outcore.model.device_stage`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from outcore.chunks.pool import Access, Guard, Pool
from outcore.chunks.store import RunStore
from outcore.memory.place import Place
from outcore.model.unit import Binding, Unit, resting
from outcore.optim.gradients import Gradients


class Stage(Protocol):
    """The memory that the computing device reads parameters from."""

    device: torch.device
    lasting: bool
    """Whether a unit's parameters have the same addresses whenever it is open: see [Note: Stable addresses]."""

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        """The tensors that the unit's parameters point at while it is open, one per binding."""

    def open(self, unit: Unit) -> None:
        """Bring the unit's parameters, or wait until they are there."""

    def close(self, unit: Unit) -> None:
        """The unit is not used for now: its memory may be taken."""

    def stale(self, unit: Unit) -> None:
        """The unit's parameters changed on the host: copies elsewhere are worth nothing now."""

    def replaced(self, unit: Unit) -> None:
        """All of the unit's parameters are about to change on the host, frozen ones too."""

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        """Take over a parameter's gradient."""

    def gradients_complete(self, unit: Unit) -> None:
        """No more gradients of this unit come from the current backward."""

    def backward_over(self) -> None:
        """A backward pass has ended."""

    def settle_gradients(self) -> None:
        """Bring all gradients of the step to where they are measured: to the host, and summed over ranks."""

    def collected(self) -> set[int]:
        """Numbers of the parameters whose gradients are still on their way there."""

    def forget_gradients(self) -> None:
        """Drop those gradients, or bring them where they will be dropped."""

    def synchronize(self) -> None:
        """Wait until all gradients have arrived on the host."""

    def anticipate(self) -> None:
        """A step was called: begin to bring what the next lap needs first."""

    def occupy(self, nbytes: int) -> None:
        """Count bytes beside parameters that stay where the device computes (buffers)."""

    def resting(self, binding: Binding) -> torch.Tensor:
        """What a parameter reads as while its unit is closed; see `Binding.resting`."""

    def hang(self, model: nn.Module) -> Sequence[Callable[[], None]]:
        """Put around the model's forward what parameters here need; undone by what is returned."""

    def shut(self) -> None:
        """Give everything back."""


class HostStage:
    """Computing on the CPU: parameters are used where their chunks lie."""

    lasting = True

    def __init__(self, pool: Pool, spans: Mapping[RunStore, Place], gradients: Gradients) -> None:
        self.device = torch.device("cpu")
        self._pool = pool
        self._gradients = gradients
        self._guards: dict[Unit, Guard] = {}
        self._occupied = 0
        self._flats = {
            store: span.tensor[: store.run.nbytes].view(store.run.dtype) for store, span in spans.items()
        }

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return [view(self._flats[b.store], b) for b in unit.bindings]

    def open(self, unit: Unit) -> None:
        self._guards[unit] = self._pool.guard(unit.parameter_chunks, Access.READ)

    def close(self, unit: Unit) -> None:
        self._guards.pop(unit).close()

    def stale(self, unit: Unit) -> None:
        pass

    def replaced(self, unit: Unit) -> None:
        pass

    def collect(self, unit: Unit, binding: Binding, gradient: torch.Tensor) -> None:
        self._gradients.add(binding.store, binding.slot, gradient.contiguous())

    def gradients_complete(self, unit: Unit) -> None:
        for store in unit.stores:
            self._gradients.measure(store)

    def backward_over(self) -> None:
        pass

    def settle_gradients(self) -> None:
        pass

    def collected(self) -> set[int]:
        return set()

    def forget_gradients(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def anticipate(self) -> None:
        pass

    def occupy(self, nbytes: int) -> None:
        self._pool.borrow(nbytes)
        self._occupied += nbytes

    def resting(self, binding: Binding) -> torch.Tensor:
        return resting(binding.slot.shape, binding.store.run.dtype, self.device)

    def hang(self, model: nn.Module) -> Sequence[Callable[[], None]]:
        return ()

    def shut(self) -> None:
        for guard in self._guards.values():
            guard.close()
        self._guards.clear()
        self._pool.repay(self._occupied)
        self._occupied = 0


def view(flat: torch.Tensor, binding: Binding, before: int = 0) -> torch.Tensor:
    """A parameter within its run's flat tensor, in which ``before`` elements lie before those that are kept."""
    slot = binding.slot
    start = before + slot.offset
    return flat[start : start + slot.numel].view(slot.shape)
