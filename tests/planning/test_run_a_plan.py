"""offload(..., plan=...): the run is the plan's, and nothing beside it may contradict it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from exact.families import FAMILIES
from outcore.errors import UsageError
from outcore.offloaded import engine_of
from planning.accuracy import CPU, EMU, off

LLAMA = FAMILIES[1]
ROWS = {name: torch.cat([value] * 4) for name, value in LLAMA.batch(0).items()}

ONE = {"micro_batch": 4, "activations": outcore.Activations("recompute"), "chunk_size": "128KiB"}
"""No search: where what is planned matters little."""


def planned(folder: Path | None, **settings: Any) -> outcore.Plan:
    model = LLAMA.build().train()
    disk = None if folder is None else f"{folder}:1GiB"
    settings = {"machine": CPU, "batch": ROWS, "budget": outcore.Budget(host="6MiB", disk=disk), **settings}
    return outcore.plan(model, **settings)


def offload(plan: outcore.Plan, **settings: Any) -> Any:
    torch.manual_seed(7)
    model = LLAMA.build().train()
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(model, optimizer, plan=plan, **settings)
    return model, optimizer


@pytest.mark.parametrize(
    "activations",
    [outcore.Activations("keep"), outcore.Activations("recompute"), outcore.Activations("recompute", 2)],
    ids=["keep", "recompute", "slices"],
)
def test_the_run_has_the_settings_and_the_peaks_of_the_plan(
    activations: outcore.Activations, tmp_path: Path
) -> None:
    made = planned(tmp_path, activations=activations, accumulate=2, micro_batch=4, chunk_size="128KiB")
    model, optimizer = offload(made)
    engine = engine_of(model)
    assert engine.activations == made.activations == activations
    assert engine.precision == made.precision
    assert dict(engine.ledger.budget) == {"host": made.limits.host, "disk": 1 << 30}
    assert max(c.nbytes for u in engine.units for c in u.parameter_chunks) <= made.chunk_bytes
    batch = {name: value[: made.micro_batch] for name, value in ROWS.items()}
    for _ in range(3):
        for _ in range(made.accumulate):
            LLAMA.loss(model(**batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = outcore.snapshot(model).peak
    outcore.release(model)
    assert abs(off(made.outcome.peak["host"], held["host"])) < 0.05
    assert held["host"] <= made.limits.host


def test_what_is_named_twice_alike_is_no_contradiction(tmp_path: Path) -> None:
    made = planned(tmp_path, chunk_size="128KiB", units=["model.layers.*"])
    model, _ = offload(
        made,
        budget=outcore.Budget(host="6MiB"),
        activations=made.activations,
        precision=outcore.Precision("bf16"),
        chunk_size="128KiB",
        units=["model.layers.*"],
    )
    outcore.release(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"activations": outcore.Activations("recompute", loss_slice=3)},
            "activations=.* leave activations out",
        ),
        ({"precision": outcore.Precision("fp32")}, "precision=.* is what the plan was made with"),
        ({"chunk_size": "64KiB"}, "chunk_size=131072 is what the plan"),
        ({"prefetch": False}, "prefetch=True is what the plan"),
        ({"units": ["model.norm"]}, "units=.* is what the plan"),
        (
            {"budget": outcore.Budget(host="7MiB")},
            "the plan's host budget is 6.0 MiB, and '7MiB' contradicts it",
        ),
        ({"budget": outcore.Budget(device="7MiB")}, "the plan's device budget is none"),
        ({"budget": outcore.Budget(disk="elsewhere")}, "other directories"),
    ],
)
def test_what_contradicts_the_plan_is_refused(settings: Any, said: str, tmp_path: Path) -> None:
    made = planned(tmp_path, chunk_size="128KiB", units=["model.layers.0"])
    with pytest.raises(UsageError, match=said):
        offload(made, **settings)


def test_a_plan_for_a_described_disk_wants_a_directory(tmp_path: Path) -> None:
    made = planned(None, chunk_size="128KiB")
    assert made.outcome.peak["disk"]
    with pytest.raises(UsageError, match="no directory is named"):
        offload(made)
    model, _ = offload(made, budget=outcore.Budget(disk=tmp_path))
    assert engine_of(model).ledger.budget["host"] == made.limits.host
    outcore.release(model)


def test_a_plan_of_another_model_or_machine_is_refused() -> None:
    made = planned(None, budget=outcore.Budget(host="64MiB"))
    other = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="plan for this model"):
        outcore.offload(other, outcore.AdamW(other.parameters()), plan=made)
    model = LLAMA.build()
    with pytest.raises(UsageError, match=r"has [0-9,]+ and 0"):
        outcore.offload(model, plan=made)
    on_device = planned(None, machine=replace(EMU, host=64 << 20), budget=outcore.Budget(host="32MiB"))
    with pytest.raises(UsageError, match="computes on an accelerator, and this run doesn't"):
        offload(on_device, device="cpu")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            partial(outcore.AdamW, moments="8bit"),
            r"keeps low \(int16\), exp_avg .* this one keeps .*: plan with this",
        ),
        (outcore.Lion, "this one keeps .*: plan with this optimizer"),
        (outcore.Adam, ""),
    ],
    ids=["8bit", "lion", "adam"],
)
def test_a_plan_for_an_optimizer_that_keeps_other_states_is_refused(make: Any, said: str) -> None:
    made = planned(None, budget=outcore.Budget(host="64MiB"), **ONE)
    model = LLAMA.build()
    if said:
        with pytest.raises(UsageError, match=said):
            outcore.offload(model, make(model.parameters()), plan=made)
    else:  # it keeps what AdamW keeps
        outcore.offload(model, make(model.parameters()), plan=made, device="cpu")
        outcore.release(model)


def test_whole_parameters_are_another_plan() -> None:
    wide = replace(CPU, flops={"fp32": 1e11})
    made = planned(
        None, machine=wide, budget=outcore.Budget(host="64MiB"), precision=outcore.Precision("fp32"), **ONE
    )
    model = LLAMA.build()
    with pytest.raises(UsageError, match="of whole parameters: plan with this optimizer"):
        outcore.offload(model, outcore.Foreign(torch.optim.NAdam, model.parameters()), plan=made)


def test_a_choice_of_policies_is_searched(tmp_path: Path) -> None:
    ways = [outcore.Activations("recompute"), outcore.Activations("recompute", 2)]
    assert planned(tmp_path, activations=ways).activations in ways
    with pytest.raises(UsageError, match="empty choice"):
        planned(tmp_path, activations=[])
