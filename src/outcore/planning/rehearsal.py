"""A step traced without values: who is opened when, what it allocates, what it computes.

[Note: Fake step]
The model's parameters and buffers are exchanged for fake tensors (shapes and dtypes, no bytes), and one forward and
backward runs through the very hooks that `outcore.offload` hangs in, with a stage that does nothing. So the
order of units, recomputation, tied weights and modules called twice come out as they will be, not as a formula says.
Storages are charged once, when they first appear, and credited when they are freed, as `outcore.trace.meter` does
in a run; each belongs to a category, by when it appeared.

[Note: Values]
Where a model asks for values, it is told what usually holds: a condition over all elements is true (a mask that
hides nothing), one over any element is false (no NaN), a number is 0; and each expert of a mixture is
hit, by an even share of the tokens.

Fake tensors are on the CPU: there the attention that is traced is the fused one, which is also what accelerators take.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from outcore.errors import ModelError, OutcoreError
from outcore.model.activations import recompute, recomputes_itself
from outcore.model.backward import BackwardPass
from outcore.model.hooks import PointHooks
from outcore.model.laps import Laps
from outcore.model.placement import wants_fp32
from outcore.model.residency import Residency
from outcore.model.trees import tensors_of
from outcore.model.unit import Unit
from outcore.model.units import Point
from outcore.planning.work import Work

CATEGORIES = ("inputs", "activations", "logits", "working set", "gradients")
"""What storages are for: inputs and what is made before the first unit; what forward leaves; the head's results and the
loss; temporaries of backward, recomputed activations among them; gradients on their way to their chunks."""

Event = tuple[str, int]
"""``("forward" | "backward" | "closed" | "gradient", unit)``; a lap begins with ``("begin", -1)``."""


@dataclass
class Span:
    """From one event to the next.

    Attributes:
        event: what it begins with.
        peak: the most bytes alive in it, of storages that operators made since the lap began.
        live: bytes alive at its end.
        parts: the peak, by `CATEGORIES`.
        work: what is computed in it.
    """

    event: Event
    peak: int = 0
    live: int = 0
    parts: tuple[int, ...] = (0,) * len(CATEGORIES)
    work: Work = field(default_factory=Work.none)


@dataclass
class Trace:
    """A forward with its backward.

    Attributes:
        spans: in order.
        growth: the most that the gauge of a run sets aside in the first lap, where it measures.
        tokens: elements of the largest integer input, as many as the batch has tokens.
    """

    spans: list[Span]
    growth: int
    tokens: int

    @property
    def peak(self) -> int:
        return max(span.peak for span in self.spans)

    @property
    def work(self) -> Work:
        total = Work.none()
        for span in self.spans:
            total.add(span.work)
        return total


def rehearse(
    model: nn.Module,
    lay: Callable[[nn.Module], tuple[Sequence[Unit], Sequence[Point]]],
    batch: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    dtype: torch.dtype,
    recomputes: bool,
) -> Trace:
    """Trace one forward and backward.

    Args:
        model: any module; it is as it was afterwards, its values are not touched.
        lay: divides the fake model in units.
        batch: keyword arguments of the model's call; only shapes and dtypes of tensors matter.
        loss: from the model's output, a scalar.
        dtype: what the model computes in.
        recomputes: whether blocks are recomputed in backward.

    Raises:
        ModelError: the model can't be traced: its shapes depend on values, or it raises.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _faked(model, mode, dtype):
        units, points = lay(model)
        recorder = _Recorder()
        tokens = 0
        undo = _hang(model, units, points, recorder, dtype, recomputes)
        try:
            with mode, _unrecognised():
                inputs = tree_map(_fake_input, dict(batch))
                tokens = max((t.numel() for t in tensors_of(inputs) if not t.is_floating_point()), default=0)
                tokens = tokens or max((t.shape[0] for t in tensors_of(inputs) if t.dim()), default=1)
                with recorder:
                    loss(model(**inputs)).backward()
        except OutcoreError:
            raise
        except Exception as error:
            text = str(error).strip().splitlines()
            raise ModelError(
                f"the model can't be traced without values ({type(error).__name__}: {text[0] if text else ''})"
            ) from error
        finally:
            for step in reversed(undo):
                step()
    recorder.cut(("end", -1))
    return Trace(recorder.spans, recorder.growth, tokens)


@contextmanager
def _faked(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model holds fake parameters (in the dtype they are computed in) and buffers."""
    keep = wants_fp32(model)
    parameters = [(m, dict(m._parameters)) for m in model.modules()]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    made: dict[nn.Parameter, nn.Parameter] = {}
    with mode:
        for module, own in parameters:
            for name, parameter in own.items():
                if parameter is None:
                    continue
                if parameter not in made:
                    cast_it = parameter.is_floating_point() and parameter not in keep
                    values = torch.empty(parameter.shape, dtype=dtype if cast_it else parameter.dtype)
                    made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
        for module, kept in buffers:
            for name, buffer in kept.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    try:
        yield
    finally:
        for module, own in parameters:
            module._parameters.update(own)
        for module, kept in buffers:
            module._buffers.update(kept)


@contextmanager
def _unrecognised() -> Iterator[None]:
    """Inside, transformers takes fake tensors for ordinary ones.

    For those it recognises it builds masks that a run, which can look into them, finds to be superfluous.
    """
    known: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(known, "is_fake_tensor", None)
    if before is None:
        yield
        return
    known.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        known.is_fake_tensor = before


def _fake_input(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _hang(
    model: nn.Module,
    units: Sequence[Unit],
    points: Sequence[Point],
    recorder: _Recorder,
    dtype: torch.dtype,
    recomputes: bool,
) -> list[Callable[[], object]]:
    """The hooks of `outcore.engine`, told to a recorder."""
    here: Any = _Here()
    clock: Any = recorder
    residency = Residency(here, clock, here, cast(Any, recorder))
    backward = BackwardPass(residency, recorder.complete)
    recorder.last_block = max((i for p in points if p.block for i in p.units), default=-1)
    undo: list[Callable[[], object]] = []
    for point in points:
        opened = tuple(units[i] for i in point.units)
        undo.append(PointHooks(point.module, opened, residency, backward).remove)
        if recomputes and point.block and not recomputes_itself(point.module):
            undo.append(recompute(point.module))
    undo.append(Laps(model, torch.device("cpu"), dtype, clock, cast(Any, recorder), backward).remove)
    for unit in units:
        for binding in unit.bindings:
            parameter = binding.parameter
            binding.resting = parameter.data
            if not parameter.requires_grad:
                continue

            def accumulated(
                parameter: torch.Tensor, unit: Unit = unit, index: int = binding.slot.index
            ) -> None:
                if parameter.grad is not None:
                    recorder.gradient(parameter.grad)
                parameter.grad = None
                backward.accumulated(unit, index)

            undo.append(parameter.register_post_accumulate_grad_hook(accumulated).remove)
    return undo


class _Here:
    """A stage, and gradients, where everything is always there."""

    device = torch.device("cpu")

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return [binding.parameter.data for binding in unit.bindings]

    def open(self, unit: Unit) -> None:
        pass

    def close(self, unit: Unit) -> None:
        pass

    def expected(self, stores: object) -> tuple[()]:
        return ()


class _Recorder(TorchDispatchMode):
    """Cuts the step in spans, and counts. A clock and a gauge to the hooks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans = [Span(("begin", -1))]
        self.growth = 0
        self.last_block = -1
        self._charged: dict[int, list[int]] = {}
        self._parts = [0] * len(CATEGORIES)
        self._live = 0
        self._phase = 0
        self._peak = 0
        self._reserved = 0
        self._largest = 0
        self._experts = 1
        self._holding: set[int] = set()

    # -- what the hooks tell ----------------------------------------------------------------------

    def window(self, key: Hashable) -> None:
        phase, index = cast(Event, key)
        self.cut((phase, index))
        if phase == "forward" and self._phase == CATEGORIES.index("inputs"):
            self._phase = CATEGORIES.index("activations")
        elif phase == "closed" and index == self.last_block and self._phase == CATEGORIES.index("activations"):
            self._phase = CATEGORIES.index("logits")
        elif phase == "backward":
            self._phase = CATEGORIES.index("working set")

    def complete(self, unit: Unit) -> None:
        self.cut(("gradient", unit.index))

    def cut(self, event: Event) -> None:
        self.spans[-1].live = self._live
        if event[0] != "end":
            self.spans.append(Span(event, self._live, self._live, tuple(self._parts)))

    def gradient(self, gradient: torch.Tensor) -> None:
        """A storage turned out to be a parameter's gradient."""
        entry = self._charged.get(gradient.untyped_storage()._cdata)
        if entry is not None:
            nbytes, category = entry
            self._parts[category] -= nbytes
            entry[1] = CATEGORIES.index("gradients")
            self._parts[entry[1]] += nbytes

    def begin(self, key: Hashable, size: int) -> None:
        """A gauge's lap; nothing to do."""

    def end(self) -> None:
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
        if func in _DEPENDS:
            result = self._assumed(func, args)
        else:
            result = func(*args, **kwargs)
        incoming = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in incoming and storage._cdata not in self._charged:
                    self._charge(storage)
        if func._overloadpacket is torch.ops.aten.all:
            self._holding.add(result.untyped_storage()._cdata)
        self.spans[-1].work.note(func, args, kwargs, result)
        return result

    def _assumed(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What depends on values, see [Note: Values]."""
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

    def _grow(self) -> None:
        """What `outcore.trace.gauge` does at a new peak of the lap that it measures, if there is room."""
        self._largest = max(self._largest, self._live - self._reserved)
        if self._live > self._reserved:
            self._reserved = self._live + self._largest // 2
        self.growth = max(self.growth, self._reserved)


_DEPENDS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})
