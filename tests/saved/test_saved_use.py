"""What users do around offloaded activations: the same as in memory, or a refusal in one sentence."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import outcore
from engine.twin import Run, same, small, spread
from exact.shapes import WIDTH, Block, Stack
from outcore.engine import Engine
from outcore.errors import ModelError, UsageError
from outcore.model.policies import read_activations
from outcore.offloaded import engine_of

OFFLOAD = outcore.Activations("offload")
WAYS = pytest.mark.parametrize("way", ["offload", "recompute+offload"])


def nothing_left(engine: Engine | None) -> None:
    """No saved tensor holds bytes on the disk, and none is pinned."""
    assert engine is not None
    engine.settle()
    assert engine.ledger._kinds.get(("disk", "activations"), 0) == 0
    assert engine.pool.pinned == engine.stage._occupied  # type: ignore[attr-defined]


@WAYS
def test_evaluation_two_forwards_and_accumulation(way: Any, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        with torch.no_grad():
            run.loss(50)
        first, second = run.loss(1), run.loss(2, batch=5)  # two forwards before a backward
        run.optimizer.backward(first + second)
        run.backward(3)
        run.step()
        run.train(4, 5)
        if run.engine is not None:
            nothing_left(run.engine)

    same(script, tmp_path, activations=outcore.Activations(way), tight="4MiB")


@WAYS
def test_a_graph_that_is_kept(way: Any, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for step in range(3):
            loss = run.loss(step)
            loss.backward(retain_graph=True)
            loss.backward()
            run.step()

    same(script, tmp_path, activations=outcore.Activations(way))


def test_a_graph_that_is_dropped(tmp_path: Path) -> None:
    """Nothing of it stays: not on the disk, not pinned, no descriptor."""
    with spread(budget=outcore.Budget(host="3MiB", disk=tmp_path), activations=OFFLOAD) as run:
        run.train(0, 1)
        nothing_left(run.engine)
        descriptors = len(os.listdir("/proc/self/fd"))
        for seed in range(3):
            loss = run.loss(seed)
            assert run.engine is not None
            assert run.engine.ledger._kinds["disk", "activations"] + run.engine.pool.used > 0
            del loss
        gc.collect()
        nothing_left(run.engine)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        run.train(2)


class Raising(Stack):
    fail = False

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for k, block in enumerate(self.blocks):
            if self.fail and k == 2:
                raise ValueError("in the middle")
            x = block(x)
        return self.head(x)


def test_an_exception_in_the_middle(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.train(0)
        run.model.fail = True
        with pytest.raises(ValueError, match="in the middle"):
            run.loss(1)
        run.model.fail = False
        loss = run.loss(2)
        loss.register_hook(_raise)
        with pytest.raises(ValueError, match="in backward"):
            loss.backward()
        del loss
        run.optimizer.zero_grad()
        run.train(3, 4)

    same(script, tmp_path, build=lambda: Raising(4), activations=OFFLOAD, tight="4MiB")


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("in backward")


class InPlace(nn.Module):
    """Changes what an operator saved."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(x).exp()
        y.add_(1)  # exp saved its result
        return y


def test_changes_in_place_are_found(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), InPlace())
    outcore.offload(model, budget=outcore.Budget(host="64MiB", disk=tmp_path), activations=OFFLOAD)
    loss = model(torch.randn(2, 3, WIDTH, requires_grad=True)).float().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    outcore.release(model)


def test_slices_keep_their_whole_inputs_elsewhere(tmp_path: Path) -> None:
    """Blocks in slices save their inputs whole: the same bits with and without them offloaded."""
    logs = []
    for way in ("recompute", "recompute+offload"):
        activations = outcore.Activations(way, microbatch=2)  # type: ignore[arg-type]
        with spread(budget=outcore.Budget(host="6MiB", disk=tmp_path), activations=activations) as run:
            run.train(0, 1, batch=6)
            logs.append((run.log, {name: value.clone() for name, value in outcore.weights(run.model)}))
    assert logs[0][0] == logs[1][0]
    assert all(torch.equal(value, logs[1][1][name]) for name, value in logs[0][1].items())


def test_each_block_in_its_own_way(tmp_path: Path) -> None:
    activations = outcore.Activations(
        "recompute", units={"blocks.0": "keep", "1": "recompute+offload", "*.2": "offload"}
    )
    with spread(budget=outcore.Budget(host="64MiB", disk=tmp_path), activations=activations) as run:
        assert run.engine is not None
        assert run.engine.ways == {"blocks.0": "keep", "blocks.1": "recompute+offload", "blocks.2": "offload"}
    same(lambda run: run.train(0, 1, 2), tmp_path, activations=activations)
    by_name = outcore.Activations("keep", units=lambda name: "offload" if name.endswith("1") else None)
    same(lambda run: run.train(0, 1), tmp_path, activations=by_name)


def test_what_can_not_be(tmp_path: Path) -> None:
    budget = outcore.Budget(host="64MiB", disk=tmp_path)
    for settings, error, said in (
        ({"budget": outcore.Budget(host="64MiB"), "activations": OFFLOAD}, UsageError, "name one, Budget"),
        ({"budget": budget, "activations": outcore.Activations(units={"h.0": "keep"})}, ModelError, "'h.0'"),
    ):
        with pytest.raises(error, match=said), spread(**settings):  # type: ignore[arg-type]
            pass
    for make, said in (
        (lambda: outcore.Activations("drop"), "unknown way with activations 'drop'; choose from keep"),  # type: ignore[arg-type]
        (lambda: outcore.Activations(units={"a": "drop"}), "'drop' for 'a'"),  # type: ignore[dict-item]
        (lambda: outcore.Activations(units=7), "must be a mapping or a function"),  # type: ignore[arg-type]
        (lambda: outcore.Activations("offload", microbatch=2), "works on recomputed blocks"),
        (lambda: outcore.Activations("recompute", 2, units={"h.0": "keep"}), "works on recomputed blocks"),
        (lambda: read_activations("offload,h.0"), "write a way, and NAME=WAY"),
        (lambda: read_activations("offload,h.0=drop"), "'drop' for 'h.0'"),
        (lambda: outcore.Activations(units=lambda name: "no").way("h.0"), "'no' for 'h.0'"),  # type: ignore[arg-type,return-value]
    ):
        with pytest.raises(UsageError, match=said):
            make()
    written = outcore.Activations("offload", units={"h.0": "keep", "h.*": "recompute"})
    assert read_activations(str(written)) == written


class Around(Stack):
    """Puts a checkpoint around its blocks itself."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_hooks_of_others_are_refused(tmp_path: Path) -> None:
    budget = outcore.Budget(host="64MiB", disk=tmp_path)
    with (
        spread(lambda: Around(2), budget=budget, activations=OFFLOAD) as run,
        pytest.raises(ModelError, match=r"blocks.0 is called where other hooks take what it saves"),
    ):
        run.loss(0)


class Wide(nn.Module):
    """Saves views of one storage, an expanded tensor, a transposed one, a buffer and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.linspace(0, 1, WIDTH).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(WIDTH, dim=-1)
        row = x[:, :1].sum(-1, keepdim=True).expand_as(q)
        return (
            F.relu(q * k * self.scale + (v.transpose(0, 1) * 2).sigmoid().transpose(0, 1) * row) * self.mask
        )


def test_what_is_shared_moves_once_and_weights_never(tmp_path: Path) -> None:
    """Two blocks: bytes that went into chunks are those of the different storages that they save."""
    same(lambda run: run.train(0, 1), tmp_path, build=lambda: wide(2), activations=OFFLOAD, tight="6MiB")
    with spread(
        lambda: wide(2), budget=outcore.Budget(host="64MiB", disk=tmp_path), activations=OFFLOAD
    ) as run:
        loss = run.loss(0)
        assert run.engine is not None
        saver = run.engine.saver
        assert saver is not None
        rows = 3 * 12 * 2  # bytes of a bf16 column over batch and length
        whole = rows * WIDTH
        for group in saver._groups:
            stored = [entry.span.nbytes for entry in group.alive()]
            # x, qkv in one piece, q * k, q * k * scale is not needed, the sigmoid, relu's, the row
            assert stored.count(3 * whole) == 1, "q, k and v are one storage"
            assert 160 * 480 * 2 not in stored
            assert not {WIDTH * 2, WIDTH * 4} & set(stored), "the scale and the mask stay"
            assert sum(stored) < 11 * whole
        loss.backward()


def wide(blocks: int) -> nn.Module:
    model = small()
    model.blocks = nn.ModuleList(Wide() for _ in range(blocks))
    return model


class Prepared(torch.autograd.Function):
    """Makes its gradient in forward, and hands the very tensor that was saved to backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(x, 2.0))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved  # type: ignore[no-any-return]


class Preparing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Prepared.apply(self.linear(x))  # type: ignore[no-any-return]


def test_a_gradient_that_is_what_was_saved_is_let_go(tmp_path: Path) -> None:
    model = nn.Sequential(*(Preparing() for _ in range(4)))
    optimizer = outcore.AdamW(model.parameters())
    budget = outcore.Budget(host="8MiB", disk=tmp_path)
    outcore.offload(model, optimizer, budget=budget, activations=OFFLOAD, device="cpu")
    engine = engine_of(model)
    for _ in range(3):
        model(torch.ones(512, 256)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert engine.saver is not None
        engine.saver.sweep()
        engine.settle()
        assert engine.pool.pinned == engine.stage._occupied  # type: ignore[attr-defined]
    outcore.release(model)
