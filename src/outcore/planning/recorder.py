"""Counts what a traced step allocates and computes, from one event to the next.

Storages are charged once, when they first appear, and credited when they are freed, as `outcore.trace.meter` does
in a run; each belongs to a category, by when it appeared.

[Note: Values]
Where a model asks for values, it is told what usually holds: a condition over all elements is true (a mask that
hides nothing), one over any element is false (no NaN), two tensors of one shape are equal, a number is 0; and each
expert of a mixture is hit, by an even share of the tokens.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outcore.model.unit import Unit
from outcore.planning.tape import Recording, Tape, Timed
from outcore.planning.work import Work
from outcore.trace.extents import Extents

CATEGORIES = ("inputs", "activations", "logits", "working set", "gradients")
"""What storages are for: inputs and what is made before the first unit; what forward leaves; the head's results and the
loss; temporaries of backward, recomputed activations among them; gradients on their way to their chunks."""

Event = tuple[str, int]
"""``("forward" | "backward" | "closed" | "arrives" | "gradient", unit)``; a lap begins with ``("begin", -1)``."""

WITHIN = ("arrives", "gradient")
"""Events within a window of the gauge: the first gradient of a unit, and the last."""


@dataclass
class Span:
    """From one event to the next.

    Attributes:
        event: what it begins with.
        peak: the most bytes alive in it, of storages that operators made since the lap began.
        live: bytes alive at its end.
        parts: the peak, by `CATEGORIES`.
        work: what is computed in it.
        stored: what blocks offload in it: the number of the unit that asks for it in backward, and bytes.
        shown: the most bytes of that which backward sees at one time, where they are pinned for it.
        tape: the same, to be run; empty unless it was recorded.
    """

    event: Event
    peak: int = 0
    live: int = 0
    parts: tuple[int, ...] = (0,) * len(CATEGORIES)
    work: Work = field(default_factory=Work.none)
    stored: list[tuple[int, int]] = field(default_factory=list)
    shown: int = 0
    tape: Timed = field(default_factory=Tape, repr=False, compare=False)


class Recorder(TorchDispatchMode):
    """Cuts the step in spans, and counts. A clock and a gauge to the hooks.

    Args:
        recording: writes tapes of the spans; none are written without.
    """

    def __init__(self, recording: Recording | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans = [Span(("begin", -1))]
        self._recording = recording
        self._tape = cast(Tape, self.spans[-1].tape)
        self.growth = 0
        self.last_block = -1
        self.sliced: frozenset[int] = frozenset()
        self.wide: set[int] = set()
        self._charged: dict[int, list[int]] = {}
        self._parts = [0] * len(CATEGORIES)
        self._live = 0
        self._phase = 0
        self._peak = 0
        self._reserved = 0
        self._largest = 0
        self._experts = 1
        self._holding: set[int] = set()
        self._arriving: set[Unit] = set()
        self._counts = True
        self._shown = 0

    # -- what the hooks tell ----------------------------------------------------------------------

    def window(self, key: Hashable) -> None:
        """A unit is about to be opened, or was closed."""
        phase, index = cast(Event, key)
        self.cut((phase, index))
        if phase == "forward" and self._phase == CATEGORIES.index("inputs"):
            self._phase = CATEGORIES.index("activations")
        elif (
            phase == "closed" and index == self.last_block and self._phase == CATEGORIES.index("activations")
        ):
            self._phase = CATEGORIES.index("logits")
        elif phase == "backward":
            self._phase = CATEGORIES.index("working set")

    def complete(self, unit: Unit) -> None:
        """A unit has its gradients."""
        self._arriving.discard(unit)
        self.cut(("gradient", unit.index))

    def cut(self, event: Event) -> None:
        """Begin a new span."""
        self.spans[-1].live = self._live
        if event[0] != "end":
            self._tape = Tape()
            shares = tuple(self._parts)
            self.spans.append(Span(event, self._live, self._live, shares, shown=self._shown, tape=self._tape))

    def gradient(self, unit: Unit, gradient: torch.Tensor, wide: bool) -> None:
        """A storage turned out to be a parameter's gradient.

        Args:
            wide: it is a sum in fp32 where the parameter has 16 bits.
        """
        if wide:
            self.wide.add(unit.index)
        if unit not in self._arriving:
            self._arriving.add(unit)
            self.cut(("arrives", unit.index))
        entry = self._charged.get(gradient.untyped_storage()._cdata)
        if entry is not None:
            nbytes, category = entry
            self._parts[category] -= nbytes
            entry[1] = CATEGORIES.index("gradients")
            self._parts[entry[1]] += nbytes

    def stored(self, unit: int, nbytes: int) -> None:
        """A block offloads so many bytes."""
        self.spans[-1].stored.append((unit, nbytes))

    def show(self, nbytes: int) -> None:
        """Backward sees so many more bytes of chunks, or so many less."""
        self._shown += nbytes
        self.spans[-1].shown = max(self.spans[-1].shown, self._shown)

    @contextmanager
    def counting(self, on: bool) -> Iterator[None]:
        """Whether what appears inside is counted."""
        before, self._counts = self._counts, on
        try:
            yield
        finally:
            self._counts = before

    def begin(self, key: Hashable, inputs: Extents) -> None:
        """A gauge's lap; nothing to do."""

    def end(self, whole: bool = True) -> None:
        """A gauge's lap; nothing to do."""

    def lap(self, key: Hashable) -> None:
        """A clock's lap; nothing to do."""

    def tick(self, key: Hashable, needs: object) -> None:
        """A clock's tick; windows tell the same."""

    # -- what operators do ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        result = self._assumed(func, args) if func in _DEPENDS else func(*args, **kwargs)
        incoming = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in incoming:
                    self._holding.discard(storage._cdata)  # a new one, where one that is gone was
                    if self._counts and storage._cdata not in self._charged:
                        self._charge(storage)
        if func._overloadpacket is torch.ops.aten.all:
            self._holding.add(result.untyped_storage()._cdata)
        if not self._is_probing():
            self.spans[-1].work.note(func, args, kwargs, result)
            if self._recording is not None and func not in _DEPENDS:
                self._recording.ran(self._tape, func, args, kwargs, result)
        return result

    def _is_probing(self) -> bool:
        """Whether a block that runs in slices is being examined, as its first call alone is.

        Its memory counts, for the first lap is the one that a run measures; its work doesn't. What such a block
        computes in forward, it computes with gradients.
        """
        phase, index = self.spans[-1].event
        return phase == "forward" and index in self.sliced and not torch.is_grad_enabled()

    def _assumed(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What depends on values, see [Note: Values]."""
        if func is torch.ops.aten.equal.default:
            return args[0].shape == args[1].shape
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype is torch.bool:
                return args[0].untyped_storage()._cdata in self._holding
            return 0.0 if args[0].is_floating_point() else 0
        mask = args[0]
        elements = mask.numel()
        if mask.dim() == 1 or mask.shape[-1] == 1:
            self._experts = max(1, elements)
            rows = elements
        else:
            rows = math.ceil(elements / self._experts)
        return torch.empty((rows, mask.dim()), dtype=torch.long)

    def _charge(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        entry = [nbytes, self._phase]
        self._charged[storage._cdata] = entry
        self._live += nbytes
        self._parts[self._phase] += nbytes
        span = self.spans[-1]
        if self._live > span.peak:
            span.peak, span.parts = self._live, tuple(self._parts)
        if self._live > self._peak:
            self._peak = self._live
            self._grow()
        weakref.finalize(storage, self._credit, storage._cdata, entry)

    def _credit(self, key: int, entry: list[int]) -> None:
        if self._charged.get(key) is entry:
            del self._charged[key]
        self._live -= entry[0]
        self._parts[entry[1]] -= entry[0]
        if self._recording is not None:
            self._recording.died(self._tape, key)

    def _grow(self) -> None:
        """What `outcore.trace.gauge` does at a new peak of the lap that it measures, if there is room."""
        self._largest = max(self._largest, self._live - self._reserved)
        if self._live > self._reserved:
            self._reserved = self._live + self._largest // 2
        self.growth = max(self.growth, self._reserved)


_DEPENDS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.equal.default,
    }
)
