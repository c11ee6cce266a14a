"""What a plan is for: a model with its optimizer and its batch, divided and traced as `outcore.offload` would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from outcore.errors import ModelError, UsageError
from outcore.model.placement import wants_fp32
from outcore.model.policies import Activations, Precision, offloads
from outcore.model.trees import tensors_of
from outcore.model.unit import Unit
from outcore.model.units import Point, discover
from outcore.optim.kernels import Rule
from outcore.planning.depth import Depth
from outcore.planning.fake_step import Trace, stretched, trace_step
from outcore.planning.virtual import lay

Loss = Callable[[Any], torch.Tensor]

SLICES = 3
"""The most slices of a batch that are traced; see `outcore.planning.fake_step.stretched`."""


@runtime_checkable
class Trains(Protocol):
    """An optimizer, or what is known of one: its rule, and what it trains."""

    @property
    def rule(self) -> Rule:
        """How a parameter is updated."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters, in the order of their numbers."""


@dataclass(frozen=True)
class UnitFacts:
    """One unit: its name, its parameters and how many of them are trained."""

    name: str
    parameters: int
    trained: int


@dataclass(frozen=True)
class Facts:
    """What a model is, whatever it runs on.

    Attributes:
        parameters: how many; those that are shared counted once.
        trained: how many of them are.
        shared: names beyond the first under which parameters are registered (tied weights).
        buffers: bytes of buffers.
        units: in the order in which they are numbered.
    """

    parameters: int
    trained: int
    shared: int
    buffers: int
    units: tuple[UnitFacts, ...]

    @property
    def largest(self) -> UnitFacts:
        """The unit with the most parameters."""
        return max(self.units, key=lambda unit: unit.parameters)


class Subject:
    """A model to be planned for. It is never run with values, and never changed.

    Args:
        model: any module, also on ``meta``.
        optimizer: one of outcore's, made from the model's parameters, that has not stepped.
        batch: keyword arguments of a call; of tensors only shapes and dtypes matter, the first dimension of the
            first being the batch's.
        loss: from the model's output to a scalar; by default its ``loss``, or the mean of its first tensor.
        precision: what to compute in.
        patterns: names of units, as `outcore.offload` takes them.
        on_host: whether the host computes; what activations that are offloaded leave where depends on it.

    Attributes:
        taped: whether traces keep what it takes to run them.

    Raises:
        ModelError: the model has no parameters, or the optimizer is another model's.
        UsageError: the batch has no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Trains,
        batch: Mapping[str, Any],
        loss: Loss | None = None,
        precision: Precision | None = None,
        patterns: Sequence[str] | None = None,
        on_host: bool = True,
    ) -> None:
        self.model = model
        self.rule = optimizer.rule
        self.precision = precision or Precision()
        self.patterns = None if patterns is None else tuple(patterns)
        self.taped = False
        self._batch = batch
        self._on_host = on_host
        self._loss = loss or usual_loss
        self._traces: dict[tuple[int, Activations], Trace] = {}
        self._layouts: dict[int, tuple[list[Unit], list[Point]]] = {}
        tensors = [t for t in tensors_of(dict(batch)) if t.dim()]
        if not tensors:
            raise UsageError("a batch to plan for needs a tensor: batch={'input_ids': ..., 'labels': ...}")
        self.batch_size = int(tensors[0].shape[0])
        self.tokens = max(1, max(int(t.numel()) for t in tensors) // max(1, self.batch_size))
        ours = {p: name for name, p in model.named_parameters()}
        self._numbers = {}
        trained = []
        for number, parameter in enumerate(optimizer.parameters()):
            if parameter not in ours:
                raise ModelError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that is not in the model"
                )
            self._numbers[ours[parameter]] = number
            if parameter.requires_grad:
                trained.append(ours[parameter])
        self._trained = frozenset(trained)
        if not ours:
            raise ModelError("the model has no parameters")
        self.facts = self._count()

    def _count(self) -> Facts:
        plans, _ = discover(self.model, self.patterns)
        trained = self._trained
        units = tuple(
            UnitFacts(
                plan.name,
                sum(p.numel() for _, p in plan.parameters),
                sum(p.numel() for name, p in plan.parameters if name in trained),
            )
            for plan in plans
        )
        names = sum(1 for _ in self.model.named_parameters(remove_duplicate=False))
        return Facts(
            parameters=sum(unit.parameters for unit in units),
            trained=sum(unit.trained for unit in units),
            shared=names - sum(1 for _ in self.model.parameters()),
            buffers=sum(b.numel() * b.element_size() for b in self.model.buffers()),
            units=units,
        )

    @property
    def occupied(self) -> int:
        """Bytes that stay where the model computes: buffers, and one element for each parameter at rest."""
        return self.facts.buffers + sum(self.precision.dtype.itemsize for _ in self.model.parameters())

    def layout(self, chunk_bytes: int) -> tuple[list[Unit], list[Point]]:
        """The units with chunks of this size."""
        found = self._layouts.get(chunk_bytes)
        if found is None:
            found = self._layouts[chunk_bytes] = self._lay(self.model, chunk_bytes)
        return found

    def _lay(self, model: nn.Module, chunk_bytes: int) -> tuple[list[Unit], list[Point]]:
        plans, points = discover(model, self.patterns)
        names = dict(model.named_parameters())
        numbers = {names[name]: number for name, number in self._numbers.items() if name in names}
        trained = {names[name] for name in self._trained if name in names}
        kept = wants_fp32(model)
        units = lay(plans, kept, self.precision.dtype, self.rule, numbers, trained, chunk_bytes)
        return units, points

    def trace(self, micro_batch: int, activations: Activations) -> Trace:
        """One forward and backward of so many sequences.

        Raises:
            ModelError: the model can't be traced, or its blocks can't run as they are asked to.
        """
        key = micro_batch, activations
        if key not in self._traces:
            self._traces[key] = self._trace(micro_batch, activations)
        return self._traces[key]

    def _trace(self, rows: int, activations: Activations) -> Trace:
        part = activations.microbatch
        if part is not None and rows > SLICES * part:  # each more is like the last
            short, long = (self.trace(n * part, activations) for n in (SLICES - 1, SLICES))
            return stretched(short, long, rows / part - SLICES)
        return self._by_depth(rows, activations) or self._whole(rows, activations)

    def _by_depth(self, rows: int, activations: Activations) -> Trace | None:
        """As a few blocks of a deep model tell, if they do; see `outcore.planning.depth`."""
        if self.patterns is not None or activations.units or offloads(activations.blocks):
            return None  # names and numbers of units mean something here, and a shorter model has others
        depth = Depth.of(self.model, self._trained)
        if depth is None:
            return None
        try:
            with depth.shortened():
                short, names = self._whole(rows, activations), depth.units()
        except ModelError:  # a model that counts its blocks, or one that can't be traced anyway
            return None
        return depth.lengthened(short, names)

    def _whole(self, rows: int, activations: Activations) -> Trace:
        return trace_step(
            self.model,
            lambda model: self._lay(model, 1 << 40),
            self._sliced(rows),
            self._loss,
            self.precision.dtype,
            activations,
            self._on_host,
            self.taped,
        )

    def _sliced(self, size: int) -> dict[str, Any]:
        def part(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self.batch_size:
                return torch.empty((size, *value.shape[1:]), dtype=value.dtype, device="meta")
            return value

        return {name: part(value) for name, value in self._batch.items()}


def usual_loss(output: Any) -> torch.Tensor:
    """The ``loss`` of an output, or the mean of its first tensor.

    Raises:
        ModelError: it has neither.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found.mean()
    for tensor in tensors_of(output):
        if tensor.is_floating_point() and tensor.requires_grad:
            return tensor.float().mean()
    raise ModelError("the model's output has no loss: give loss=..., a function from the output to a scalar")
