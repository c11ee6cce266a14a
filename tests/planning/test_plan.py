"""outcore.plan: what it decides, what it refuses, and what its numbers obey."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from exact.families import FAMILIES
from outcore.errors import BudgetError, ModelError, UsageError
from outcore.integrations.shapes import SHAPES, shape
from outcore.planning.machine import DESCRIBED, Machine
from outcore.planning.rehearsal import rehearse
from outcore.planning.settings import Settings, candidates, dominates
from outcore.planning.strategies import KINDS
from planning.accuracy import CPU, EMU

LLAMA = FAMILIES[1]
SLOW_DISK = replace(CPU, disk_read=1e8, disk_write=1e8)


def ids(batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty((batch, length), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def planned(**settings: Any) -> outcore.Plan:
    model = LLAMA.build().train()
    settings.setdefault("machine", CPU)
    settings.setdefault("batch", LLAMA.batch(0))
    return outcore.plan(model, **settings)


def test_a_plan_can_be_run(tmp_path: Path) -> None:
    made = planned(budget=outcore.Budget(host="6MiB", disk=f"{tmp_path}:1GiB"), chunk_size="128KiB")
    model = LLAMA.build().train()
    outcore.offload(
        model,
        outcore.AdamW(model.parameters()),
        budget=made.budget,
        precision=made.precision,
        activations=made.activations,
        chunk_size=made.chunk_bytes,
    )
    LLAMA.loss(model(**LLAMA.batch(0))).backward()
    assert outcore.snapshot(model).peak["host"] <= made.limits.host
    outcore.release(model)


def test_no_step_is_faster_than_its_slowest_part() -> None:
    for machine in (CPU, SLOW_DISK, EMU):
        made = planned(machine=machine, budget=outcore.Budget(host="6MiB"), chunk_size="128KiB")
        assert made.outcome.seconds >= made.floor > 0
        assert made.outcome.seconds <= made.outcome.compute + made.outcome.update + sum(
            made.outcome.busy.values()
        )
        assert made.tokens == 48


def test_the_bottleneck_is_named() -> None:
    tight = outcore.Budget(host="6MiB")
    assert planned(machine=SLOW_DISK, budget=tight, chunk_size="128KiB").bottleneck == "disk"
    assert planned(machine=replace(EMU, link_in=1e6), chunk_size="128KiB").bottleneck == "device in"
    assert planned(machine=replace(CPU, update=1e7)).bottleneck == "update"
    assert planned(machine=CPU).bottleneck == "compute"


def test_more_memory_never_moves_more() -> None:
    moved = [
        planned(
            budget=outcore.Budget(host=size), chunk_size="128KiB", activations=outcore.Activations("keep")
        ).outcome.moved.get("disk read", 0)
        for size in ("5MiB", "7MiB", "9MiB", "64MiB")
    ]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 0


def test_what_fits_nowhere_is_refused_with_what_would_do() -> None:
    with pytest.raises(BudgetError) as caught:
        planned(budget=outcore.Budget(host="1MiB"))
    assert caught.value.tier == "host"
    assert "the smallest budgets that would do" in caught.value.remedy
    needed = caught.value.needed
    assert planned(budget=outcore.Budget(host=needed * 21 // 20), micro_batch=2).limits.host > needed


def test_without_a_disk_all_states_must_be_on_the_host() -> None:
    diskless = replace(CPU, disk=0)
    recomputing = outcore.Activations("recompute")
    settings: dict[str, Any] = dict(machine=diskless, micro_batch=2, activations=recomputing)
    with pytest.raises(BudgetError) as caught:
        planned(budget=outcore.Budget(host="3MiB"), **settings)
    told = rehearse(LLAMA.build(), None, LLAMA.batch(0), on_host=True, activations=recomputing)
    assert (caught.value.tier, caught.value.needed) == ("host", told.whole)
    assert told.least.host < 3 << 20  # what is pinned would have room
    enough = outcore.Budget(host=told.whole * 21 // 20)
    assert planned(budget=enough, **settings).limits.host == told.whole * 21 // 20


def test_where_the_least_has_room_the_simulated_run_says_what_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outcore.planning.planner.shortage", lambda *arguments: None)
    with pytest.raises(BudgetError, match="the smallest budgets that would do") as caught:
        planned(budget=outcore.Budget(host="1MiB"))
    assert caught.value.tier == "host"
    assert caught.value.needed > caught.value.budget + 1


def test_the_nearest_change_is_named() -> None:
    model = LLAMA.build().train()
    batch = ids(64, 24)
    settings: dict[str, Any] = dict(batch=batch, machine=CPU, micro_batch=64)
    keep = outcore.Activations("keep")
    with pytest.raises(BudgetError, match="; or recompute activations, or use micro-batches of 32"):
        outcore.plan(model, budget=outcore.Budget(host="17MiB"), activations=keep, **settings)
    small = replace(CPU, disk=2 << 20)
    with pytest.raises(BudgetError, match=r"add [0-9.]+ MiB of disk"):
        outcore.plan(model, budget=outcore.Budget(host="3MiB"), batch=LLAMA.batch(0), machine=small)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"budget": outcore.Budget(device="1GiB")}, UsageError, "computes on the CPU"),
        ({"budget": outcore.Budget(host="100GiB")}, BudgetError, "has no more"),
        ({"accumulate": 0}, UsageError, "at least 1"),
        ({"micro_batch": 3}, UsageError, "can't be cut into micro-batches of 3"),
        ({"batch": {"x": 3}}, UsageError, "needs a tensor"),
        ({"machine": "abacus"}, UsageError, "unknown machine"),
        ({"precision": outcore.Precision("fp16")}, UsageError, "no FLOP/s for fp16"),
        ({"units": ["nothing"]}, ModelError, "no module of the model is named"),
    ],
)
def test_what_can_mean_nothing_is_refused(settings: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        planned(**settings)


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = outcore.AdamW(nn.Linear(3, 3).parameters())
    with pytest.raises(ModelError, match="not in the model"):
        outcore.plan(LLAMA.build(), other, batch=LLAMA.batch(0), machine=CPU)


def test_the_search_tries_what_it_may() -> None:
    keep = outcore.Activations("keep")
    every = list(candidates(8, None, None, None))
    assert {s.micro_batch for s in every} == {8, 4, 2, 1}
    assert all(s.micro_batch * s.accumulate == 8 for s in every)
    assert list(candidates(8, 4, [keep], 1 << 20)) == [Settings(4, 2, keep, 1 << 20)]
    ways = [s.activations for s in candidates(8, 8, None, None, 1024, sliced_loss=True)]
    assert ways[2:] == [
        outcore.Activations("recompute", 1, logits="keep"),
        outcore.Activations("recompute", 1),
    ]
    sliced, again = (Settings(8, 1, way, 8 << 20) for way in ways[2:])
    assert not dominates(sliced, again)  # which holds less
    assert dominates(sliced, replace(sliced, micro_batch=4, accumulate=2))


def test_the_search_finds_the_fastest() -> None:
    best = planned(budget=outcore.Budget(host="8MiB"), accumulate=2)
    for micro in (4, 2, 1):
        for way in ("keep", "recompute"):
            try:
                one = planned(
                    budget=outcore.Budget(host="8MiB"),
                    accumulate=2,
                    micro_batch=micro,
                    activations=outcore.Activations(way),  # type: ignore[arg-type]
                )
            except BudgetError:
                continue
            assert best.outcome.seconds <= one.outcome.seconds * 1.000001


def test_the_table_follows_the_papers() -> None:
    model = shape("gpt2").model
    made = outcore.plan(model, batch=ids(2, 128), machine=DESCRIBED["a100-80g"], ranks=4)
    count = made.facts.parameters
    rows = {row.name: row for row in made.table}
    states = KINDS[:4]

    def per_parameter(name: str, tier: str) -> float:
        return sum(rows[name].tiers[tier].get(kind, 0) for kind in states) / count

    assert per_parameter("mixed precision", "device") == pytest.approx(16)
    assert per_parameter("ZeRO-1", "device") == pytest.approx(4 + 12 / 4)
    assert per_parameter("ZeRO-2", "device") == pytest.approx(2 + 14 / 4)
    assert per_parameter("ZeRO-3", "device") == pytest.approx(16 / 4)
    assert per_parameter("ZeRO-Offload", "device") == pytest.approx(2)
    assert per_parameter("ZeRO-Offload", "host") == pytest.approx(14 / 4)
    assert per_parameter("ZeRO-Infinity, host", "host") == pytest.approx(16 / 4)
    assert per_parameter("ZeRO-Infinity, NVMe", "disk") == pytest.approx(18 / 4)
    assert per_parameter("outcore", "host") <= 14
    assert all(rows[name].fits for name in rows)


def test_the_table_knows_narrow_moments() -> None:
    held = {}
    for kept in ("fp32", "bf16", "8bit"):
        model = LLAMA.build().train()
        optimizer = outcore.AdamW(model.parameters(), moments=kept)
        made = outcore.plan(model, optimizer, batch=LLAMA.batch(0), machine=CPU)
        row = next(row for row in made.table if row.name == "outcore")
        held[kept] = sum(kinds.get("moments", 0) for kinds in row.tiers.values()) / made.facts.parameters
    assert held["fp32"] == pytest.approx(8, rel=0.01)
    assert held["bf16"] == pytest.approx(4, rel=0.01)
    assert held["8bit"] == pytest.approx(2 + 1 / 32, rel=0.01)


def test_numbers_are_json() -> None:
    made = planned()
    found = json.loads(json.dumps(made.as_dict()))
    assert found["peak_bytes"] == dict(made.outcome.peak)
    assert found["settings"]["precision"] == "bf16"
    assert "parameters on a test" in str(made)


@pytest.mark.parametrize("name", ["llama-7b", "llama-70b", "gpt3-175b"])
def test_large_shapes_have_their_size(name: str) -> None:
    count = sum(p.numel() for p in shape(name).model.parameters())
    told = {"llama-7b": 6.74e9, "llama-70b": 68.98e9, "gpt3-175b": 174.6e9}
    assert count == pytest.approx(told[name], rel=0.002)
    assert set(told) < set(SHAPES)


BIG = """
import resource, sys, time
start = time.process_time()
from outcore.cli.main import run
try:
    run(["plan", "--model", "gpt3-175b", "--machine", "a100-80g", "--disk", "4TB", "--seq-len", "2048",
         "--batch-size", "2"])
except SystemExit as ended:
    assert ended.code == 0, ended.code
print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_gpt3_is_planned_within_a_minute_and_a_gibibyte() -> None:
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    seconds, nbytes = map(float, done.stdout.splitlines()[-1].split())
    assert "174,604,259,328 parameters" in done.stdout
    assert seconds < 60
    assert nbytes < 1 << 30


def test_a_machine_without_a_profile_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="run outcore profile"):
        planned(machine="this")


def test_an_impossible_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="finite number"):
        Machine("m", None, 1, 0, {"bf16": 1e9}, 1.0, float("inf"), 1e9, 0, 0, 0, 0, 1e9, 0)
