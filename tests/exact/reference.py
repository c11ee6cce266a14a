"""The same training wholly in memory, by an ordinary loop, and the offloaded one beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import outcore
from exact.shapes import Batch, Shape, built
from outcore.model.activations import treat_blocks, ways_of
from outcore.model.placement import move_buffers, replace_data
from outcore.model.slices.heads import asks_for_slices, slice_loss
from outcore.model.units import discover
from outcore.optim.due import Due
from outcore.optim.local import LocalBackend
from outcore.optim.optimizer import Optimizer

MakeOptimizer = Callable[[Any], Optimizer]


@dataclass
class Result:
    """What a run left: everything is compared bit by bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def assert_equal(self, other: Result) -> None:
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.weights.keys() == other.weights.keys()
        for name, tensor in self.weights.items():
            assert tensor.dtype is other.weights[name].dtype, name
            assert torch.equal(tensor, other.weights[name]), name


@dataclass(frozen=True)
class Loop:
    """How to train: the user's loop with its settings."""

    steps: int = 3
    accumulate: int = 1
    clip: float | None = 1.0
    precision: str = "bf16"

    def run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        shape: Shape,
        after_backward: Callable[[], None] = lambda: None,
        place: Callable[[Batch], Batch] = lambda batch: batch,
        schedule: Callable[[int], float] = lambda step: 1e-2 / (1 + step),
    ) -> Result:
        result = Result()
        torch.manual_seed(11)
        for step in range(self.steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
            for micro in range(self.accumulate):
                loss = shape.loss(model(**place(shape.batch(100 * step + micro)))) / self.accumulate
                optimizer.backward(loss)
                after_backward()
                result.losses.append(loss.item())
            if self.clip is not None:
                result.norms.append(optimizer.clip_grad_norm_(self.clip).item())
            optimizer.step()
            optimizer.zero_grad()
        return result


class InMemory(LocalBackend):
    """The optimizer's work on gradients summed in fp32, with masters from the model before it was cast.

    The update always runs on the host, as it does in outcore: of a model on a device, gradients are brought here
    and updated parameters taken back.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: dict[nn.Parameter, torch.Tensor],
        sums: dict[nn.Parameter, torch.Tensor],
    ) -> None:
        self._own = optimizer.parameters()
        super().__init__(optimizer.rule, [_on_host(p) for p in self._own])
        self._sums = sums
        self._number = {p: i for i, p in enumerate(self._own)}
        for index, (own, parameter) in enumerate(zip(self._own, self._parameters, strict=True)):
            planes = self._states(index)
            self._rule.initialise(planes, parameter.detach().view(-1), masters[own].reshape(-1))

    def present(self) -> set[int]:
        return {i for i, p in enumerate(self._own) if p.grad is not None or p in self._sums}

    def _gradient(self, index: int) -> torch.Tensor:
        own = self._own[index]
        found = self._sums.get(own, own.grad)
        assert found is not None
        return found.detach().cpu().reshape(-1)

    def clear(self) -> None:
        for parameter in self._own:
            parameter.grad = None
        self._sums.clear()

    def apply(self, due: Due) -> None:
        super().apply(due)
        for index in self.present():
            own, updated = self._own[index], self._parameters[index]
            if own is not updated:
                own.data.copy_(updated.detach())
        self.clear()

    def weight(self, parameter: nn.Parameter) -> torch.Tensor:
        index = self._number.get(parameter)
        if index is None:
            return parameter.detach().cpu()
        out = torch.empty(parameter.numel())
        self._rule.master(self._parameters[index].detach().view(-1), self._states(index), out)
        return out.view(parameter.shape)

    def set_weight(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Change a parameter in full precision; its moments stay."""
        index = self._number.get(parameter)
        if index is None:
            parameter.data.copy_(value)
            return
        kept = self._parameters[index]
        self._rule.set_master(kept.detach().view(-1), self._states(index), value.reshape(-1))
        parameter.data.copy_(kept.detach())


def _on_host(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or its copy if it is on a device."""
    return parameter if parameter.device.type == "cpu" else nn.Parameter(parameter.detach().cpu())


def in_memory(
    shape: Shape,
    loop: Loop,
    make: MakeOptimizer,
    device: str = "cpu",
    activations: outcore.Activations | None = None,
    finish: Callable[[], None] = lambda: None,
) -> Result:
    """Plain torch: a model in the compute dtype, gradients summed in fp32 from the second on, our optimizer unbound.

    All of the model is on ``device``.

    Args:
        activations: what blocks do; those that run in slices hand over sums, which are contributions in fp32.
        finish: called after each backward.
    """
    model = built(shape)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[loop.precision]
    masters = {p: p.detach().clone() for p in model.parameters()}
    batch_norms = {p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    for p in model.parameters():
        replace_data(p, p.data.to(device, p.dtype if p in batch_norms else dtype))
    move_buffers(model, torch.device(device))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    sums: dict[nn.Parameter, torch.Tensor] = {}

    def collect(p: nn.Parameter, gradient: torch.Tensor) -> None:
        sums[p] = gradient if p not in sums else sums[p] + gradient

    if activations is not None:
        points = discover(model)[1]
        list(treat_blocks(points, ways_of(points, activations), activations.microbatch, collect))
        if asks_for_slices(model, activations):
            slice_loss(model, activations)

    def after_backward() -> None:
        for p in model.parameters():
            if p.grad is not None and (loop.accumulate > 1 or p in sums):
                sums[p] = p.grad.float() if p not in sums else sums[p] + p.grad.float()
                p.grad = None
        finish()

    def place(batch: Batch) -> Batch:
        return {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in batch.items()}

    backend = InMemory(optimizer, masters, sums)
    optimizer._local = backend
    result = loop.run(model, optimizer, shape, after_backward, place)
    result.weights = {name: backend.weight(p).clone() for name, p in model.named_parameters()}
    return result


def offloaded(
    shape: Shape,
    loop: Loop,
    make: MakeOptimizer,
    inspect: Callable[[outcore.Snapshot], None] = lambda held: None,
    **settings: Any,
) -> Result:
    """The same training with states spread over tiers; no tier ever holds more than its budget.

    It computes on the CPU unless ``device`` says otherwise, also where there is an accelerator.
    """
    settings.setdefault("device", "cpu")
    model = built(shape)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    outcore.offload(model, optimizer, precision=outcore.Precision(loop.precision), **settings)
    try:
        result = loop.run(model, optimizer, shape)
        result.weights = {name: value.clone() for name, value in outcore.weights(model)}
        held = outcore.snapshot(model)
        for tier, peak in held.peak.items():
            assert peak <= held.budget.get(tier, 0), f"{tier} held {peak} of {held.budget}"
        inspect(held)
    finally:
        outcore.release(model)
    return result
