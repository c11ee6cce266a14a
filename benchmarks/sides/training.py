"""Contenders that train: outcore and plain torch. Each is made once in a process of its own and then steps.

All train the same model on the same batches: fp32 masters, bf16 in forward and backward, recomputed blocks, AdamW,
the global norm clipped at 1.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch import nn

import outcore
from outcore.integrations.transformers import build
from outcore.model.policies import ActivationsName
from outcore.offloaded import engine_of
from outcore.optim.kernels import Moments
from sides.models import MODELS, batch

WAYS: tuple[ActivationsName, ...] = get_args(ActivationsName)
LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.999), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Settings:
    """What a contender is asked to do.

    Attributes:
        contender: its name.
        device: where to compute.
        budget: bytes per tier, for outcore: ``device``, ``host``.
        rows: of each rank.
        disk: a folder for those that use one.
        ranks: how many processes train together; this one is ``RANK`` of the environment.
        loss_slice: positions of a slice of the head and the loss, for outcore; the others have no such setting.
        logits: whether a loss in slices keeps its logits.
    """

    contender: str
    model: str
    rows: int
    tokens: int
    device: str
    disk: str
    budget: dict[str, str]
    loss_slice: int | None = None
    logits: str = "recompute"
    ranks: int = 1

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"]) if self.ranks > 1 else 0

    def batch(self, number: int) -> torch.Tensor:
        whole = batch(self.model, self.rows * self.ranks, self.tokens, number)
        return whole[self.rank * self.rows :][: self.rows].to(self.device)


class Trainer(Protocol):
    """One contender at work.

    Attributes:
        update: seconds that the last step spent in the optimizer.
    """

    update: float

    def step(self, ids: torch.Tensor) -> float:
        """One whole step; returns the loss when everything is done."""

    def moved(self) -> dict[str, int]:
        """Bytes that crossed each link so far, where the contender counts them."""


class Ordinary:
    """A loop as one writes it for a model and an optimizer of torch's."""

    def __init__(
        self, model: nn.Module, optimizer: Any, forward: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.model, self.optimizer, self._forward = model, optimizer, forward
        self.update = 0.0

    def step(self, ids: torch.Tensor) -> float:
        loss = self._forward(ids)
        loss.backward()
        settle(ids.device)
        start = time.perf_counter()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        settle(ids.device)
        self.update = time.perf_counter() - start
        return loss.item()

    def _clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def moved(self) -> dict[str, int]:
        return {}


def settle(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def recomputing(model: Any) -> Any:
    """Blocks recomputed by transformers' own switch, whichever of its two names it has."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch({"use_reentrant": False})
    return model


def to_device(model: nn.Module, device: str) -> nn.Module:
    """Move a model, keeping its Parameter objects also where the backends' tensors can't be exchanged."""
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(device not in ("cpu", "cuda"))
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)


def plain_torch(settings: Settings) -> Trainer:
    """Everything in the memory of the device that computes: autocast over fp32 masters, fused AdamW."""
    model: Any = to_device(recomputing(MODELS[settings.model].build()), settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, DECAY, fused=True)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    return Ordinary(model, optimizer, forward)


class Compute:
    """No contender: forward and backward of bf16 weights that lie where it computes, and nothing else.

    What a step of the others takes beyond this and beyond its update is transfer that compute did not hide.
    """

    def __init__(self, settings: Settings) -> None:
        self.model: Any = to_device(
            recomputing(MODELS[settings.model].build()).to(torch.bfloat16), settings.device
        )
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self._drop)
        self.update = 0.0

    @staticmethod
    def _drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    def step(self, ids: torch.Tensor) -> float:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        settle(ids.device)
        return loss.item()

    def moved(self) -> dict[str, int]:
        return {}


class Outcore:
    """outcore on the tiers that its budget names; with a disk if the budget has no room for everything."""

    def __init__(
        self,
        settings: Settings,
        disk: bool,
        microbatch: int | None = None,
        way: ActivationsName = "recompute",
        moments: Moments = "fp32",
        model: Any = None,
        states: Any = "parameters",
    ) -> None:
        if settings.ranks > 1:
            dist.init_process_group("gloo")
        self.model: Any = MODELS[settings.model].build() if model is None else model
        self.optimizer = outcore.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, moments=moments
        )
        outcore.offload(
            self.model,
            self.optimizer,
            device=settings.device,
            budget=outcore.Budget(**settings.budget, disk=settings.disk if disk else None),
            activations=outcore.Activations(
                way,
                microbatch=microbatch,
                loss_slice=settings.loss_slice,
                logits=settings.logits if microbatch or settings.loss_slice else "recompute",  # type: ignore[arg-type]
            ),
            sharding=outcore.Sharding(states),
        )
        self.update = 0.0

    def step(self, ids: torch.Tensor) -> float:
        before = outcore.snapshot(self.model).spent.get("update", 0.0)
        loss = self._passes(ids)
        self.optimizer.clip_grad_norm_(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        settle(ids.device)
        self.update = outcore.snapshot(self.model).spent.get("update", 0.0) - before
        return loss

    def _passes(self, ids: torch.Tensor) -> float:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.optimizer.backward(loss)
        return float(loss.detach())

    def moved(self) -> dict[str, int]:
        return dict(outcore.snapshot(self.model).moved)

    def held(self) -> dict[str, int]:
        """The most bytes that each tier has held since this was last called, by the ledger."""
        peaks = dict(outcore.snapshot(self.model).peak)
        engine_of(self.model).ledger.reset_peaks()
        return peaks


def _from_nothing(settings: Settings) -> Outcore:
    """A model that is initialised block by block, as it goes to its tiers: it is never whole in memory."""
    return Outcore(settings, disk=True, model=build(settings.model, training=True).model)


class Micro(Outcore):
    """The same with each row of a batch as a micro-batch of its own."""

    def _passes(self, ids: torch.Tensor) -> float:
        mean = 0.0
        for row in ids.split(1):
            loss = self.model(input_ids=row, labels=row).loss / len(ids)
            self.optimizer.backward(loss)
            mean += float(loss.detach())
        return mean


def trainer(settings: Settings) -> Trainer:
    """The contender by its name."""
    from sides import fsdp2, zero3

    made: dict[str, Callable[[], Trainer]] = {
        "outcore, host": lambda: Outcore(settings, disk=False),
        "outcore, kept": lambda: Outcore(settings, disk=False, states="gradients"),
        "outcore, disk": lambda: Outcore(settings, disk=True),
        "outcore, slices": lambda: Outcore(settings, disk=True, microbatch=1),
        "outcore, never whole": lambda: _from_nothing(settings),
        "outcore, micro-batches": lambda: Micro(settings, disk=True),
        **{
            f"outcore, {way} activations": functools.partial(Outcore, settings, True, way=way) for way in WAYS
        },
        "outcore, bf16 moments": lambda: Outcore(settings, disk=True, moments="bf16"),
        "outcore, 8-bit moments": lambda: Outcore(settings, disk=True, moments="8bit"),
        "torch": lambda: plain_torch(settings),
        "compute": lambda: Compute(settings),
        "fsdp2": lambda: fsdp2.make(settings),
        "fsdp2, kept": lambda: fsdp2.make(settings, keep=True),
        "fsdp2, bf16 sums": lambda: fsdp2.make(settings, torch.bfloat16),
        "deepspeed, host": lambda: zero3.ZeRO3(settings, "cpu"),
        "deepspeed, disk": lambda: zero3.ZeRO3(settings, "nvme"),
    }
    return made[settings.contender]()
