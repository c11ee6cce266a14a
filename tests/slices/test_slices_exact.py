"""A batch in slices: the same bits in every placement, and the bits of accumulation where they must be the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.devices import Device
from exact.families import FAMILIES
from exact.reference import Loop, Result, in_memory, offloaded
from exact.shapes import SHAPES, Batch, Block, Shape, built
from exact.test_matrix import adamw
from outcore.errors import BudgetError
from outcore.offloaded import engine_of

MIXING = {"dicts", "experts", "convolutions"}
SLICED = [shape for shape in SHAPES + FAMILIES if shape.name not in MIXING]
ALL = pytest.mark.parametrize("shape", SLICED, ids=lambda shape: shape.name)
ROWS = 5


def enlarged(shape: Shape, rows: int = ROWS) -> Shape:
    """The shape with batches of more rows, all different."""

    def batch(seed: int) -> Batch:
        parts: list[Batch] = []
        while sum(len(next(iter(part.values()))) for part in parts) < rows:
            parts.append(shape.batch(seed * 1000 + len(parts)))
        return {key: torch.cat([part[key] for part in parts])[:rows] for key in parts[0]}

    return dataclasses.replace(shape, batch=batch)


def slices(rows: int, loss_slice: int | None = None) -> outcore.Activations:
    return outcore.Activations("recompute", microbatch=rows, loss_slice=loss_slice)


@pytest.mark.parametrize("where", ["cpu", pytest.param("emu", marks=pytest.mark.emulated)])
def test_kept_logits_are_those_of_training_in_memory(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shape = next(shape for shape in FAMILIES if shape.name == "gpt2")
    activations = outcore.Activations("recompute", 1, loss_slice=7, logits="keep")
    expected = in_memory(shape, Loop(), adamw, activations=activations)
    device = "1GiB" if where == "emu" else None
    if device is not None:
        request.getfixturevalue("emu")
    budget = outcore.Budget(device=device, host="14MiB", disk=tmp_path)
    found = offloaded(
        shape, Loop(), adamw, device=where, budget=budget, activations=activations, chunk_size="128KiB"
    )
    found.assert_equal(expected)


def slices_of(shape: Shape) -> outcore.Activations:
    """Slices of two rows, and of seven positions where the loss can be cut."""
    return slices(2, 7 if shape.name in ("gpt2", "llama") else None)


IGNORED = pytest.mark.filterwarnings("ignore:the loss of:UserWarning")


@IGNORED
@ALL
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_placement(shape: Shape, accumulate: int, tmp_path: Path) -> None:
    """Slices of two rows, the last of one, against the same slices in memory."""
    shape, loop = enlarged(shape), Loop(accumulate=accumulate)
    expected = in_memory(shape, loop, adamw, activations=slices_of(shape))
    for host, chunk in (("14MiB", "128KiB"), ("1GiB", "8MiB")):
        budget = outcore.Budget(host=host, disk=tmp_path)
        found = offloaded(shape, loop, adamw, budget=budget, activations=slices_of(shape), chunk_size=chunk)
        found.assert_equal(expected)


@IGNORED
@ALL
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_placement_on_a_device(shape: Shape, accumulate: int, device: Device, tmp_path: Path) -> None:
    """Sums in fp32 come down from the device as they are."""
    shape, loop = enlarged(shape), Loop(accumulate=accumulate)
    expected = in_memory(
        shape, loop, adamw, "cpu" if device.emulator else device.name, activations=slices_of(shape)
    )
    budget = outcore.Budget(device="12MiB" if device.emulator else "64MiB", host="20MiB", disk=tmp_path)
    found = offloaded(
        shape,
        loop,
        adamw,
        device=device.name,
        budget=budget,
        activations=slices_of(shape),
        chunk_size="128KiB",
    )
    found.assert_equal(expected)
    device.check()


def test_fp32(tmp_path: Path) -> None:
    shape, loop = enlarged(SHAPES[0]), Loop(precision="fp32", accumulate=2)
    budget = outcore.Budget(host="14MiB", disk=tmp_path)
    found = offloaded(shape, loop, adamw, budget=budget, activations=slices(2), chunk_size="128KiB")
    found.assert_equal(in_memory(shape, loop, adamw, activations=slices(2)))


@pytest.mark.filterwarnings("ignore:step skipped:RuntimeWarning")
def test_fp16(tmp_path: Path) -> None:
    """With its scaled loss: any two placements are the same."""
    shape, loop = enlarged(SHAPES[0]), Loop(precision="fp16")
    found = [
        offloaded(shape, loop, adamw, budget=budget, activations=slices(2), chunk_size="128KiB")
        for budget in (outcore.Budget(host="14MiB", disk=tmp_path), outcore.Budget(host="1GiB"))
    ]
    found[0].assert_equal(found[1])


# -- against accumulation ------------------------------------------------------------------------------


def _blocks() -> nn.Module:
    return nn.Sequential(*(Block(64) for _ in range(3)))


def _layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _rows(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(8, rows, 64, generator=torch.Generator().manual_seed(seed))[:, :12]


def _sum(output: Any) -> torch.Tensor:
    return output.float().square().sum()


def _of_batch(build: Any) -> Shape:
    return Shape("batch", build, lambda seed: {build_name(build): _rows(seed // 100, 12)}, _sum)


def build_name(build: Any) -> str:
    return "input" if build is _blocks else "src"


def _of_micro_batches(build: Any, rows: int) -> Shape:
    """Batch 100 * step + i is the i-th slice of the batch of that step; the loop divides each loss by their number."""

    def batch(seed: int) -> Batch:
        step, micro = divmod(seed, 100)
        return {build_name(build): _rows(step, 12)[micro * rows : (micro + 1) * rows]}

    return Shape("micro", build, batch, lambda output: _sum(output) * (8 // rows))


@pytest.mark.parametrize("build", [_blocks, _layers], ids=["blocks", "encoder layers"])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_slices_give_what_accumulation_gives(build: Any, rows: int, tmp_path: Path) -> None:
    """A model of blocks alone whose loss is a sum over rows: every norm and weight has the bits of accumulation."""
    expected = in_memory(_of_micro_batches(build, rows), Loop(accumulate=8 // rows), adamw)
    found = offloaded(
        _of_batch(build),
        Loop(),
        adamw,
        budget=outcore.Budget(host="14MiB", disk=tmp_path),
        activations=slices(rows),
        chunk_size="128KiB",
    )
    Result([], found.norms, found.weights).assert_equal(Result([], expected.norms, expected.weights))


def test_a_batch_of_one_slice_is_recomputed_as_ever(tmp_path: Path) -> None:
    shape = SHAPES[0]
    budget = outcore.Budget(host="14MiB", disk=tmp_path)
    found = offloaded(shape, Loop(), adamw, budget=budget, activations=slices(3), chunk_size="128KiB")
    found.assert_equal(in_memory(shape, Loop(), adamw))


def test_a_unit_is_fetched_once_for_all_slices(tmp_path: Path) -> None:
    """Bytes up to the device and down, against separate micro-batches: the slices of a pass count as one."""
    moved: dict[str, dict[str, int]] = {}
    for name, rows, accumulate in (("slices", 8, 1), ("micro-batches", 1, 8)):
        shape = enlarged(SHAPES[0], rows)
        before: list[Any] = []
        offloaded(
            shape,
            Loop(steps=3, accumulate=accumulate),
            adamw,
            before.append,
            budget=outcore.Budget(host="1500KiB", disk=tmp_path),
            activations=slices(1),
            chunk_size="128KiB",
        )
        moved[name] = dict(before[0].moved)
    assert moved["micro-batches"]["disk read"] > 2 * moved["slices"]["disk read"]


@pytest.mark.emulated
def test_sums_land_in_page_locked_memory(emu: ModuleType, tmp_path: Path) -> None:
    """Where they didn't, the copy down would block the thread that computes."""
    model = built(SHAPES[0])
    budget = outcore.Budget(device="12MiB", host="20MiB", disk=tmp_path)
    outcore.offload(model, adamw(model.parameters()), device="emu", budget=budget, activations=slices(1))
    for unit in engine_of(model).units:
        for store in unit.stores:
            for total, gradient in zip(store.totals, store.gradients, strict=True):
                assert type(total.region) is type(gradient.region)
    outcore.release(model)


@pytest.mark.emulated
def test_the_least_device_holds_sums(emu: ModuleType, tmp_path: Path) -> None:
    """Gradients in fp32 are counted before the first step: slices ask for more of a device than recomputation does."""
    needed = {}
    for name, activations in (("slices", slices(1)), ("whole", outcore.Activations("recompute"))):
        model = built(SHAPES[0])
        budget = outcore.Budget(device=100_000, host="20MiB", disk=tmp_path)
        with pytest.raises(BudgetError) as refused:
            outcore.offload(
                model, adamw(model.parameters()), device="emu", budget=budget, activations=activations
            )
        needed[name] = refused.value.needed
    assert needed["slices"] > needed["whole"]
