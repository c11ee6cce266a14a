"""Devices without streams, and those whose storages keep their size, emulated: the bits are the CPU's.

What a device offers is found by trying; here it is said. XLA devices, which offer neither, are in `test_xla.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.devices import Device
from exact.reference import Loop, Result, in_memory, offloaded
from exact.shapes import SHAPES, Shape, built
from exact.test_matrix import adamw
from outcore.errors import UsageError
from outcore.memory.device import NoStreams, Offers, offers
from outcore.model import fresh_stage, sites
from outcore.model.aliases import Aliases
from outcore.model.fresh_stage import FreshStage
from outcore.offloaded import engine_of

pytestmark = pytest.mark.emulated

KINDS = pytest.mark.parametrize("resizing", [True, False], ids=["no streams", "no streams, no resizing"])
SOME = [pytest.param(s, marks=() if s.name == "tied" else pytest.mark.slow) for s in SHAPES]


@pytest.fixture
def plain(resizing: bool, monkeypatch: pytest.MonkeyPatch, emu: ModuleType) -> Device:
    """The emulated accelerator as one without streams and, where asked for, with storages that keep their size."""
    for module in (sites, fresh_stage):
        monkeypatch.setattr(module, "offers", lambda device: Offers(False, resizing, storages=True))
    return Device(emu.NAME, emu)


def trained(
    shape: Shape, loop: Loop, disk: Path, device: Device, memory: str = "8MiB", **more: Any
) -> Result:
    budget = outcore.Budget(device=memory, host="14MiB", disk=disk)
    return offloaded(shape, loop, adamw, device=device.name, budget=budget, chunk_size="128KiB", **more)


@KINDS
@pytest.mark.parametrize("shape", SOME, ids=lambda shape: shape.name)
def test_placement(shape: Shape, plain: Device, tmp_path: Path) -> None:
    """Whatever stays and whatever leaves, also of what autograd saves: the device counts no byte more than is said."""
    loop = Loop(steps=2, accumulate=2)
    expected = in_memory(shape, loop, adamw)

    def counted(held: outcore.Snapshot) -> None:
        assert plain.peak() <= held.peak["device"]

    plain.watch()
    trained(shape, loop, tmp_path, plain, inspect=counted).assert_equal(expected)
    plain.watch()
    recompute = outcore.Activations("recompute")
    trained(shape, loop, tmp_path, plain, inspect=counted, activations=recompute).assert_equal(expected)
    plain.check()


@KINDS
def test_frames_are_given_back(plain: Device, resizing: bool) -> None:
    """Between forward and backward a device holds what autograd saved, and nothing of the parameters."""
    shape = SHAPES[0]
    model = built(shape)
    optimizer = adamw(model.parameters())
    outcore.offload(
        model,
        optimizer,
        device=plain.name,
        budget=outcore.Budget(device="1GiB", host="64MiB"),
        precision=FP32,
    )
    stage = engine_of(model).stage
    assert isinstance(stage, FreshStage) is not resizing
    for _ in range(2):  # the first one is measured
        loss = shape.loss(model(**shape.batch(1)))
        for unit in engine_of(model).units:
            stage.replaced(unit)
        torch.accelerator.synchronize()
        states = sum(p.numel() * p.element_size() for p in model.parameters())
        assert torch.accelerator.memory_allocated() < states / 2
        optimizer.backward(loss)
    outcore.release(model)


FP32 = outcore.Precision("fp32")


@KINDS
def test_activations_are_not_offloaded_from_there(plain: Device, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without streams can't offload activations"):
        trained(SHAPES[0], Loop(), tmp_path, plain, activations=outcore.Activations("offload"))


def test_what_a_device_offers_is_tried(emu: ModuleType) -> None:
    assert offers(torch.device(emu.NAME)) == Offers(streams=True, resizing=True, storages=True)


def test_what_is_recorded_without_streams_is_over(emu: ModuleType) -> None:
    emu.configure(h2d_gbps=0.01)
    streams = NoStreams(torch.device(emu.NAME))
    host = torch.ones(100_000).pin_memory()
    copy = torch.empty(100_000, device=emu.NAME)
    with streams.copy_in:
        copy.copy_(host, non_blocking=True)
    event = streams.record(streams.copy_in)
    assert event.query()
    event.synchronize()
    streams.compute.wait_event(event)
    host.zero_()
    assert copy.sum().item() == 100_000


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).view(4, 6))

    def forward(self, x: torch.Tensor, spoil: bool = False) -> torch.Tensor:
        kept = x * 2
        found = (kept @ self.weight.view(6, 4).t().contiguous().t() @ self.weight[:, 1:5].t()).exp().sum()
        if spoil:
            kept.add_(1)
        return found


def test_saved_views_follow_their_parameter() -> None:
    """Backward sees what a parameter holds then; what is changed in place is refused, as torch does."""
    model = Views()
    values = model.weight.data * 0.01
    undo = Aliases([model.weight], torch.device("cpu"), strided=True).around(model)
    x = torch.full((2, 6), 0.1, requires_grad=True)
    model.weight.data = values
    loss = model(x)
    model.weight.data = torch.full((4, 6), float("nan"))
    model.weight.data = values.clone()
    loss.backward()
    found = x.grad, model.weight.grad
    undo()
    assert "forward" not in vars(model)
    x.grad = model.weight.grad = None
    model(x).backward()
    assert torch.equal(found[0], x.grad)
    assert torch.equal(found[1], model.weight.grad)
    Aliases([model.weight], torch.device("cpu"), strided=True).around(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x, spoil=True).backward()
