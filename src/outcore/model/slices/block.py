"""A recomputed block that runs a batch in slices, in forward and in backward.

[Note: Slices]
Forward runs the block on one slice after the other and keeps its input alone; backward runs each slice again,
back-propagates it, and goes on to the next. So the activations of one slice exist at a time, while the block's unit
is open once in forward and once in backward for all of them: all of this happens between its hooks. (Schedules of this
kind are called vertical.)

[Note: What slices equal]
Each slice is computed as a micro-batch of those rows is: the same operators on the same shapes, so the same bits. A
parameter's gradients over the slices of a pass are summed in fp32, in the order of the rows, and their sum is one
contribution to the step (`outcore.optim.gradients` tells of their width). From the same gradients of its
outputs, a block so gets in one pass, to the bit, what accumulation over separate micro-batches gives it. What remains
different is outside: a loss over the batch is not the mean of losses over micro-batches to the last bit, embeddings
and norms around the blocks see the batch whole, and arguments without rows that need gradients (a position bias made by
another block) get theirs summed in fp32 and rounded. Where a step has several passes, the sums of each are added; and a
batch of one slice is recomputed as without slices.

[Note: Graphs that forget]
Forward makes a graph like any other and drops what it saves, for some modules and operators choose another way of
computing when no gradient is needed, and the slices of forward and backward must not differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from outcore.errors import ModelError
from outcore.model.buffers import CallBuffers
from outcore.model.draws import Draws, draws_kept
from outcore.model.forwards import around_forward
from outcore.model.graph import next_sequence_number, reaches_beyond
from outcore.model.recomputation import Recomputation
from outcore.model.slices.cut import Arguments, arguments_of, has_cache
from outcore.model.slices.probe import (
    Layout,
    batch_norms,
    changes_its_input,
    examine,
    outputs_of,
    refuse_batch_norm,
)
from outcore.model.slices.surroundings import Autocast
from outcore.model.trees import put_together, structure_of

Collect = Callable[[nn.Parameter, torch.Tensor], None]
"""Takes over a parameter's gradient, summed over the slices of one backward pass, in fp32."""


def recompute_in_slices(
    module: nn.Module,
    name: str,
    rows: int,
    collect: Collect | None = None,
    computing: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Let a block run batches in slices and recompute each in backward; see [Note: Slices].

    Args:
        name: the block's, for messages.
        rows: of a slice.
        collect: takes the gradients of parameters; without it they go to ``.grad``, rounded to its dtype.
        computing: of a batch of one slice, as `outcore.model.activations.recompute` takes it.

    Returns:
        A function that undoes it.
    """
    original = module.forward
    sliced = _SlicedBlock(module, original, name, rows, collect, Recomputation(module, name, computing))

    return around_forward(module, lambda _: lambda *args, **kwargs: sliced(args, kwargs))


class _SlicedBlock:
    """What calls of one block share."""

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        name: str,
        rows: int,
        collect: Collect | None,
        recomputation: Recomputation,
    ) -> None:
        self.recomputation = recomputation
        self.function = function
        self.name = name
        self.rows = rows
        self.collect = collect
        self._module = module
        self._norms = batch_norms(module)
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with_graph = torch.is_grad_enabled()
        if has_cache(args, kwargs):
            if with_graph:
                raise ModelError(
                    f"the block {self.name} is given a cache of keys and values, which slices would fill several "
                    "times: train with model.config.use_cache = False, or leave microbatch out"
                )
            return self.function(*args, **kwargs)
        arguments = arguments_of(self.name, self.function, args, kwargs)
        if arguments.rows <= self.rows:
            if not with_graph:
                return self.function(*args, **kwargs)
            return self.recomputation(self.function, args, kwargs)
        call = _Call(self, arguments, self._layout(arguments))
        if not with_graph:
            return call.without_graph(arguments)
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        tensors = _Slices.apply(call, arguments, *arguments.tensors, *parameters)  # type: ignore[no-untyped-call]
        return put_together(call.skeleton, tensors)

    def _layout(self, arguments: Arguments) -> Layout:
        refuse_batch_norm(self.name, self._norms)
        key = (self._module.training, torch.is_grad_enabled(), *arguments.kind)
        if key not in self._layouts:
            layout, certain = examine(self.name, self._module, self.function, arguments)
            if not certain:
                return layout
            self._layouts[key] = layout
        return self._layouts[key]


class _Call:
    """One call of a block on a batch of several slices.

    Attributes:
        arguments: without their tensors, which whoever needs them keeps.
        skeleton: of the block's output, once it has run.
    """

    def __init__(self, block: _SlicedBlock, arguments: Arguments, layout: Layout) -> None:
        self.block = block
        self.arguments = arguments.with_tensors(())
        self.layout = layout
        self.skeleton: Any = None
        self.device = arguments.device
        self._draws: list[Draws] = []
        self._buffers: list[CallBuffers] = []
        self._autocast = Autocast.now(self.device)

    def without_graph(self, arguments: Arguments) -> Any:
        """The block's output where no gradient is needed."""
        wholes: list[torch.Tensor] = []
        for start, stop in arguments.slices(self.block.rows):
            self._gather(wholes, self._run(arguments.pieces(start, stop)), start, stop)
        return put_together(self.skeleton, wholes)

    def forward(
        self, arguments: Arguments, needed: Sequence[bool], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs, and those of them that have no gradient.

        Args:
            needed: which arguments need one.
        """
        wholes: list[torch.Tensor] = []
        differentiable: set[int] = set()
        versions = [t._version for t in arguments.tensors]
        for start, stop in arguments.slices(self.block.rows):
            self._draws.append(Draws.now(self.device, self._draws[-1] if self._draws else None))
            leaves, first = _leaves(arguments.pieces(start, stop), needed), next_sequence_number()
            buffers = self.block.recomputation.buffers()
            self._buffers.append(buffers)
            forgets = saved_tensors_hooks(_forget, _forgotten)
            with buffers.computing(), torch.enable_grad(), forgets, self._autocast.again():
                tensors = self._run(leaves)
            if start == 0 and reaches_beyond(tensors, first, [*leaves, *parameters]):
                raise ModelError(
                    f"the block {self.block.name} uses a tensor that needs gradients and is none of its arguments, so "
                    "it can't run in slices: pass the tensor to it, or leave microbatch out"
                )
            self._gather(wholes, tensors, start, stop)
            differentiable.update(k for k, tensor in enumerate(tensors) if tensor.requires_grad)
            del tensors
        if [t._version for t in arguments.tensors] != versions:
            raise changes_its_input(self.block.name)
        return wholes, [whole for k, whole in enumerate(wholes) if k not in differentiable]

    def backward(
        self,
        arguments: Arguments,
        needed: Sequence[bool],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Run each slice again and back-propagate it.

        Returns:
            The gradients of the arguments that need one, and of the parameters, those in fp32.
        """
        own: list[torch.Tensor | None] = [None] * len(arguments.tensors)
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        with draws_kept(self.device), self._autocast.again():
            for number, (start, stop) in enumerate(arguments.slices(self.block.rows)):
                self._draws[number].restore()
                leaves = _leaves(arguments.pieces(start, stop), needed)
                with self._buffers[number].computing():
                    found = self._gradients(leaves, parameters, gradients, start, stop)
                for k, gradient in enumerate(found[: len(leaves)]):
                    if gradient is not None and arguments.by_rows[k]:
                        own[k] = _write(own[k], gradient, start, stop, arguments.rows)
                    elif gradient is not None:
                        own[k] = _add(own[k], gradient)
                for k, gradient in enumerate(found[len(leaves) :]):
                    if gradient is not None:
                        sums[k] = _add(sums[k], gradient)
                del found
        rounded = [
            gradient if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(own, arguments.tensors, strict=True)
        ]
        return rounded, sums

    def _gradients(
        self,
        leaves: list[torch.Tensor],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        start: int,
        stop: int,
    ) -> Sequence[torch.Tensor | None]:
        """One slice's gradients of its leaves and of the parameters, as far as they have some."""
        with torch.enable_grad():
            outputs = self._run(leaves)
        pairs = [
            (tensor, gradient[start:stop] if carries else gradient)
            for tensor, gradient, carries in zip(outputs, gradients, self.layout, strict=True)
            if gradient is not None and tensor.requires_grad and (carries or start == 0)
        ]
        if not pairs:
            return [None] * (len(leaves) + len(parameters))
        of, given = zip(*pairs, strict=True)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(of, [*wanted, *parameters], given, allow_unused=True)
        rest = iter(found)
        return [next(rest) if leaf.requires_grad else None for leaf in leaves] + list(rest)

    def _run(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        output = self.arguments.call(self.block.function, pieces)
        skeleton, tensors = outputs_of(self.block.name, output)
        if self.skeleton is None:
            self.skeleton = skeleton
        if len(tensors) != len(self.layout) or structure_of(skeleton) != structure_of(self.skeleton):
            raise ModelError(
                f"the block {self.block.name} returns other things for some slices than for others, so it can't run in "
                "slices: leave microbatch out"
            )
        return tensors

    def _gather(self, wholes: list[torch.Tensor], tensors: list[torch.Tensor], start: int, stop: int) -> None:
        """Write a slice's outputs where they belong; what has no rows is taken from the first slice."""
        for k, (tensor, carries) in enumerate(zip(tensors, self.layout, strict=True)):
            tensor = tensor.detach()
            if not carries:
                if start == 0:
                    wholes.append(tensor.clone())
                continue
            if tensor.dim() == 0 or tensor.shape[0] != stop - start:
                raise ModelError(
                    f"the block {self.block.name} returns a tensor of shape {list(tensor.shape)} for {stop - start} "
                    "samples, so its slices can't be put together: leave microbatch out"
                )
            if start == 0:
                wholes.append(tensor.new_empty((self.arguments.rows, *tensor.shape[1:])))
            wholes[k][start:stop].copy_(tensor)


class _Slices(torch.autograd.Function):
    """The node of a block in the graph; its parameters are inputs only so that it is one of theirs."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, arguments: Arguments, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(arguments.tensors)
        ctx.call = call
        ctx.needed = ctx.needs_input_grad[2 : 2 + count]
        ctx.parameters = tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        wholes, constant = call.forward(arguments, ctx.needed, ctx.parameters)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, parameters = ctx.call, ctx.parameters
        arguments = call.arguments.with_tensors(ctx.saved_tensors)
        own, sums = call.backward(arguments, ctx.needed, parameters, gradients)
        collect = call.block.collect
        if collect is None:
            rounded = [s if s is None else s.to(p.dtype) for p, s in zip(parameters, sums, strict=True)]
            return (None, None, *own, *rounded)
        for k, parameter in enumerate(parameters):
            summed, sums[k] = sums[k], None
            if summed is not None:
                collect(parameter, summed)
        return (None, None, *own, *sums)


def _leaves(pieces: list[torch.Tensor], needed: Sequence[bool]) -> list[torch.Tensor]:
    return [piece.detach().requires_grad_(need) for piece, need in zip(pieces, needed, strict=True)]


def _write(
    whole: torch.Tensor | None, gradient: torch.Tensor, start: int, stop: int, rows: int
) -> torch.Tensor:
    if whole is None:
        whole = gradient.new_zeros((rows, *gradient.shape[1:]))
    whole[start:stop].copy_(gradient)
    return whole


def _add(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Sum in fp32 (or wider, if the gradients are)."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    if total is None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return torch.empty(gradient.shape, dtype=wide, device=gradient.device).copy_(gradient)
    return total.add_(gradient)


def _forget(tensor: torch.Tensor) -> None:
    """See [Note: Graphs that forget]."""


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("the graph of a slice's forward has no backward")
