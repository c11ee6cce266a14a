"""torch.distributed.checkpoint in both directions, compared with torch's own loader and writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import outcore
from outcore.checkpoint.dcp import write as writing
from outcore.errors import CheckpointError, ModelError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
TIGHT = outcore.Budget(host="16MiB")


class Tied(nn.Module):
    """An embedding that is also the head, two blocks, a buffer that counts, and one scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48)) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(48, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.gain)


def made(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    big = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": big, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]


def step(model: nn.Module, optimizer: Any, seed: int) -> float:
    ids = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(ids).float(), ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def offloaded(seed: int, lr: float = 1e-2, precision: str = "fp32") -> tuple[Tied, outcore.Optimizer]:
    model = made(seed)
    optimizer = outcore.AdamW(groups(model), lr=lr, betas=(0.8, 0.99))
    outcore.offload(
        model, optimizer, budget=TIGHT, precision=outcore.Precision(precision), chunk_size="16KiB"
    )
    return model, optimizer


def torch_one(seed: int, **more: Any) -> tuple[Tied, torch.optim.AdamW]:
    model = made(seed)
    return model, torch.optim.AdamW(
        groups(model), **{"lr": 1e-2, "betas": (0.8, 0.99), "foreach": False, **more}
    )


def state_of(model: nn.Module, optimizer: outcore.Optimizer) -> dict[str, torch.Tensor]:
    """All values, moments, buffers and step counts."""
    found = {name: value.clone() for name, value in outcore.weights(model)}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    for index, states in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": value for key, value in states.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, in bf16, so that masters are not what is computed with."""
    path = tmp_path_factory.mktemp("dcp") / "step-3"
    model, optimizer = offloaded(1, precision="bf16")
    for seed in range(3):
        step(model, optimizer, seed)
    outcore.save(path, model, optimizer)
    outcore.release(model)
    return path


@pytest.mark.parametrize("part", [64 << 20, 1000, 1])
def test_torch_loads_what_is_written(
    checkpoint: Path, tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PART", part)
    outcore.to_dcp(checkpoint, tmp_path / "out", made(9))
    model, optimizer = torch_one(5, lr=7.0)
    step(model, optimizer, 0)
    weights, states = get_state_dict(model, optimizer)
    target = {"model": weights, "optim": states}
    dcp.load(target, checkpoint_id=tmp_path / "out")
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"])
    ours, ours_optimizer = offloaded(6, precision="bf16")
    outcore.load(checkpoint, ours, ours_optimizer)
    masters = dict(outcore.weights(ours))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name]), name
    for name, buffer in ours.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], buffer), name
    theirs = optimizer.state_dict()["state"]
    for index, mine in ours_optimizer.state_dict()["state"].items():
        for key, value in mine.items():
            assert torch.equal(theirs[index][key], value), (index, key)
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (g["lr"], g["betas"], g["weight_decay"]) for g in ours_optimizer.param_groups
    ]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    outcore.release(ours)
    step(model, optimizer, 4)  # and it trains on


@pytest.mark.parametrize("part", [64 << 20, 1000])
def test_there_and_back_is_the_same_to_the_bit(
    checkpoint: Path, tmp_path: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PART", part)
    outcore.to_dcp(checkpoint, tmp_path / "out", model_key="net", optimizer_key="opt")
    found = []
    for load in (
        lambda m, o: outcore.load(checkpoint, m, o),
        lambda m, o: outcore.from_dcp(tmp_path / "out", m, o, model_key="net", optimizer_key="opt"),
    ):
        model, optimizer = offloaded(3, lr=5.0, precision="bf16")
        load(model, optimizer)
        found.append((state_of(model, optimizer), [step(model, optimizer, seed) for seed in (7, 8)]))
        outcore.release(model)
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


class Cut(DefaultSavePlanner):
    """Writes each tensor in parts, as several ranks do: along some dimension, in an order that is not theirs."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self._dimension = dimension

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            shape = torch.Size() if item.tensor_data is None else item.tensor_data.size
            if item.type is not WriteItemType.TENSOR or len(shape) <= self._dimension:
                items.append(item)
                continue
            for at in reversed(range(0, shape[self._dimension], 5)):
                offsets, sizes = [0] * len(shape), list(shape)
                offsets[self._dimension] = at
                sizes[self._dimension] = min(5, shape[self._dimension] - at)
                place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(
                    place, TensorProperties(dtype=item.tensor_data.properties.dtype), shape
                )
                items.append(
                    WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=data)
                )
        import dataclasses

        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, item: WriteItem) -> Any:
        if item.type is not WriteItemType.SHARD:
            return super().resolve_data(item)
        chunk = item.tensor_data.chunk
        where = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[item.index.fqn][where].contiguous().clone()


@pytest.mark.parametrize("dimension", [None, 0, 1])
def test_what_torch_writes_is_loaded_and_goes_on_alike(tmp_path: Path, dimension: int | None) -> None:
    model, optimizer = torch_one(1)
    for seed in range(3):
        step(model, optimizer, seed)
    weights, states = get_state_dict(model, optimizer)
    planner = None if dimension is None else Cut(dimension)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "torch", planner=planner)
    ours, ours_optimizer = offloaded(4, lr=3.0)
    outcore.from_dcp(tmp_path / "torch", ours, ours_optimizer)
    values = dict(outcore.weights(ours))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(ours.named_buffers())[name], buffer), name
    theirs = optimizer.state_dict()["state"]
    for index, mine in ours_optimizer.state_dict()["state"].items():
        for key, value in mine.items():
            assert torch.equal(theirs[index][key], value), (index, key)
    assert [group["lr"] for group in ours_optimizer.param_groups] == [1e-2] * 2
    here = [step(ours, ours_optimizer, seed) for seed in (5, 6)]
    there = [step(model, optimizer, seed) for seed in (5, 6)]
    assert here == pytest.approx(there, rel=1e-5)  # two AdamWs that round in another order
    outcore.release(ours)


def test_weights_alone(tmp_path: Path) -> None:
    model = made(2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torch")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "bare")
    for folder, key in (("torch", "model"), ("bare", "")):
        ours, _ = offloaded(3)
        outcore.from_dcp(tmp_path / folder, ours, model_key=key)
        values = dict(outcore.weights(ours))
        assert all(torch.equal(value, values[name]) for name, value in model.named_parameters())
        outcore.release(ours)


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Adagrad"])
def test_other_optimizers_go_there_and_back(tmp_path: Path, kind: str) -> None:
    more = {"momentum": 0.9} if kind == "SGD" else {}
    seen = []
    for turn in range(2):
        model = made(turn)
        optimizer = getattr(outcore, kind)(model.parameters(), lr=1e-2, **more)
        outcore.offload(model, optimizer, budget=TIGHT)
        if turn == 0:
            for seed in range(2):
                step(model, optimizer, seed)
            outcore.save(tmp_path / "a", model, optimizer)
            outcore.to_dcp(tmp_path / "a", tmp_path / "b")
        else:
            outcore.from_dcp(tmp_path / "b", model, optimizer)
        seen.append([step(model, optimizer, seed) for seed in (3, 4)])
        outcore.release(model)
    assert seen[0] == seen[1]


def test_another_model_or_optimizer_is_refused_and_nothing_changes(checkpoint: Path, tmp_path: Path) -> None:
    outcore.to_dcp(checkpoint, tmp_path / "out")
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 4))
    outcore.offload(other, budget=TIGHT)
    before = {name: value.clone() for name, value in outcore.weights(other)}
    with pytest.raises(ModelError, match=r"the checkpoint has no model\.0\.weight"):
        outcore.from_dcp(tmp_path / "out", other)
    assert same(before, dict(outcore.weights(other)))
    outcore.release(other)
    model = made(0)
    optimizer = outcore.AdamW(model.parameters(), lr=1e-2)  # one group where there were two
    outcore.offload(model, optimizer, budget=TIGHT)
    with pytest.raises(CheckpointError, match=r"parameter group 0 is not the checkpoint's"):
        outcore.from_dcp(tmp_path / "out", model, optimizer)
    outcore.release(model)
    model = made(0)
    foreign = outcore.Foreign(torch.optim.NAdam, model.parameters())
    outcore.offload(model, foreign, budget=TIGHT)
    with pytest.raises(UsageError, match="Foreign"):
        outcore.from_dcp(tmp_path / "out", model, foreign)
    outcore.save(tmp_path / "foreign", model, foreign)
    outcore.release(model)
    with pytest.raises(UsageError, match="Foreign"):
        outcore.to_dcp(tmp_path / "foreign", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_damaged_checkpoint_is_not_written(checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(checkpoint, tmp_path / "copy")
    path = tmp_path / "copy" / "parameters-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        outcore.to_dcp(tmp_path / "copy", tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"copy"}


def test_a_flipped_bit_is_found(checkpoint: Path, tmp_path: Path) -> None:
    outcore.to_dcp(checkpoint, tmp_path / "out")
    path = tmp_path / "out" / "__0_0.distcp"
    whole = path.read_bytes()
    value = outcore.verify(checkpoint).parameters["blocks.0.0.weight"].value
    raw = (checkpoint / value.file).read_bytes()[value.start : value.stop]
    at = whole.index(raw) + len(raw) // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    model, optimizer = offloaded(0)
    with pytest.raises(CheckpointError, match=r"is damaged.*the model's state is undefined"):
        outcore.from_dcp(tmp_path / "out", model, optimizer)
    path.write_bytes(whole)
    outcore.from_dcp(tmp_path / "out", model, optimizer)
    outcore.release(model)
