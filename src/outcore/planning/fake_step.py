"""A step traced without values: who is opened when, what it allocates, what it computes.

[Note: Fake step]
The model's parameters and buffers are exchanged for fake tensors (shapes and dtypes, no bytes), and one forward and
backward runs through the very hooks that `outcore.offload` hangs in, with a stage that does nothing. So the
order of units, recomputation, tied weights and modules called twice come out as they will be, not as a formula says.

Fake tensors are on the CPU: there the attention that is traced is the fused one, which is also what accelerators take.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from outcore.errors import ModelError, OutcoreError
from outcore.memory.ledger import Ledger
from outcore.model.activations import treat_blocks, ways_of
from outcore.model.backward import BackwardPass
from outcore.model.hooks import PointHooks
from outcore.model.laps import Laps
from outcore.model.owners import Owners
from outcore.model.placement import wants_fp32
from outcore.model.policies import Activations, offloads
from outcore.model.residency import Residency
from outcore.model.saved.seam import NothingSaved, Saved
from outcore.model.singles import Singles
from outcore.model.slices.heads import asks_for_slices, slice_loss
from outcore.model.trees import tensors_of
from outcore.model.unit import Unit
from outcore.model.units import Point
from outcore.optim.updates import NoUpdates
from outcore.parallel.ranks import Alone
from outcore.planning.recorder import WITHIN, Recorder, Span
from outcore.planning.tape import Recording, Stretched
from outcore.planning.traced_saver import TracedSaver
from outcore.planning.work import Work
from outcore.trace.profile import Profile


@dataclass
class Trace:
    """A forward with its backward.

    Attributes:
        spans: in order.
        growth: the most that the gauge of a run sets aside in the first lap, where it measures.
        tokens: elements of the largest integer input, as many as the batch has tokens.
        wide: numbers of the units whose gradients come as fp32 sums over slices.
    """

    spans: list[Span]
    growth: int
    tokens: int
    wide: frozenset[int] = frozenset()

    @property
    def peak(self) -> int:
        return max(span.peak for span in self.spans)

    def profile(self) -> Profile:
        """The windows as the gauge of a run measures them."""
        profile = Profile()
        for span in self.spans[1:]:
            if span.event[0] not in WITHIN:
                profile.open(span.event)
            profile.note(span.peak)
        profile.peaks[0] = max(profile.peaks[0], self.spans[0].peak)
        return profile

    @property
    def work(self) -> Work:
        total = Work.none()
        for span in self.spans:
            total.add(span.work)
        return total


def trace_step(
    model: nn.Module,
    lay: Callable[[nn.Module], tuple[Sequence[Unit], Sequence[Point]]],
    batch: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    dtype: torch.dtype,
    activations: Activations,
    on_host: bool,
    taped: bool = False,
) -> Trace:
    """Trace one forward and backward.

    Args:
        model: any module; it is as it was afterwards, its values are not touched.
        lay: divides the fake model in units.
        batch: keyword arguments of the model's call; only shapes and dtypes of tensors matter.
        loss: from the model's output, a scalar.
        dtype: what the model computes in.
        activations: what blocks do with theirs, and in which slices blocks and loss run.
        on_host: whether the host computes: what blocks offload is seen there where it lies.
        taped: keep what it takes to run the spans (see `outcore.planning.tape`).

    Raises:
        ModelError: the model can't be traced: its shapes depend on values, or it raises.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _faked(model, mode, dtype):
        units, points = lay(model)
        recorder = Recorder(Recording() if taped else None)
        tokens = 0
        undo = _hang(model, units, points, recorder, dtype, activations, on_host)
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
    return Trace(recorder.spans, recorder.growth, tokens, frozenset(recorder.wide))


def stretched(short: Trace, long: Trace, times: float) -> Trace:
    """A trace of more slices than were traced: what the longer of two has more than the shorter, so many times more.

    Each slice beyond the second adds what the one before it added: to activations that stay, to what the loss sees,
    and to the work of each block.
    """

    def further(a: int, b: int) -> int:
        return round(b + (b - a) * times)

    spans = []
    for a, b in zip(short.spans, long.spans, strict=True):
        flops, attention = (
            {name: further(of[0].get(name, 0), count) for name, count in of[1].items()}
            for of in ((a.work.flops, b.work.flops), (a.work.attention, b.work.attention))
        )
        nbytes, operators, operands = (
            further(getattr(a.work, n), getattr(b.work, n)) for n in ("nbytes", "operators", "operands")
        )
        parts = tuple(map(further, a.parts, b.parts))
        peak, live = further(a.peak, b.peak), further(a.live, b.live)
        stored = [(unit, further(x, y)) for (unit, x), (_, y) in zip(a.stored, b.stored, strict=True)]
        work, tape = Work(flops, nbytes, operators, attention, operands), Stretched(a.tape, b.tape, times)
        spans.append(Span(b.event, peak, live, parts, work, stored, further(a.shown, b.shown), tape))
    growth = max(span.peak for span in spans) * long.growth // max(1, long.peak)
    return Trace(spans, growth, further(short.tokens, long.tokens), long.wide)


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
    recorder: Recorder,
    dtype: torch.dtype,
    activations: Activations,
    on_host: bool,
) -> list[Callable[[], object]]:
    """The hooks of `outcore.engine`, told to a recorder."""
    here: Any = _Here()
    clock: Any = recorder
    updates = NoUpdates()
    ways = ways_of(points, activations)
    saver = TracedSaver(recorder, model, on_host) if any(map(offloads, ways.values())) else None
    saved: Saved = saver or NothingSaved()
    gauge: Any = recorder
    singles = Singles((), here, updates, here, None, True)  # a trace shows no values
    residency = Residency(here, clock, here, gauge, updates, Ledger(), Alone(), saved, Owners(), singles)
    backward = BackwardPass(residency, recorder.complete)
    blocks = [i for p in points if p.block for i in p.units]
    recorder.last_block = max(blocks, default=-1)
    recorder.sliced = frozenset(blocks if activations.microbatch is not None else ())
    places = {binding.parameter: (unit, binding) for unit in units for binding in unit.bindings}

    def collect(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        unit, binding = places[parameter]
        recorder.gradient(unit, gradient, wide=gradient.dtype.itemsize > parameter.dtype.itemsize)
        backward.accumulated(unit, binding.slot.index)

    def accumulated(parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # none comes from a block that hands over sums
            collect(cast(nn.Parameter, parameter), gradient)

    undo: list[Callable[[], object]] = []
    with warnings.catch_warnings():  # of what a run will warn of itself
        warnings.simplefilter("ignore")
        slices_loss = asks_for_slices(model, activations)
    for point in points:
        opened = tuple(units[i] for i in point.units)
        undo.append(PointHooks(point.module, opened, residency, backward).remove)
    undo += treat_blocks(
        points,
        ways,
        activations.microbatch,
        collect,
        saver,
        lambda numbers: backward.computing([units[number] for number in numbers]),
    )
    if slices_loss:
        undo.append(slice_loss(model, activations))
    gauge, cpu = cast(Any, recorder), torch.device("cpu")
    laps = Laps(model, cpu, dtype, clock, gauge, backward, updates, Alone(), lambda *arguments: None)
    undo.append(laps.remove)
    for parameter, (_, binding) in places.items():
        binding.resting = parameter.data
        if parameter.requires_grad:
            undo.append(parameter.register_post_accumulate_grad_hook(accumulated).remove)
    return undo


class _Here:
    """A stage, and gradients, where everything is always there."""

    device = torch.device("cpu")
    lasting = False

    def views(self, unit: Unit) -> Sequence[torch.Tensor]:
        return [binding.parameter.data for binding in unit.bindings]

    def open(self, unit: Unit) -> None:
        pass

    def close(self, unit: Unit) -> None:
        pass

    def expected(self, stores: object) -> tuple[()]:
        return ()
