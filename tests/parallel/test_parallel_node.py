"""Ranks of one node hold what they have in common once, read it once, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import outcore
from exact.shapes import Frozen, Stack
from outcore.memory.host import PAGE
from outcore.model import weights as weights_of
from outcore.model.directory import Directory
from outcore.model.shared_frames import SharedFrames
from outcore.model.weights import Compared
from outcore.offloaded import engine_of
from outcore.optim.gradients import Gradients
from parallel.loops import Way, apart, offloaded, several
from parallel.test_parallel_matrix import same
from parallel.together import Place, Team, alone, run, values


def frozen() -> nn.Module:
    torch.manual_seed(7)
    return Frozen()


@pytest.mark.parametrize("build", [None, frozen])
def test_the_same_bits_as_apart(build: Any, two: Team, tmp_path: Path) -> None:
    """Frames, and with "none" frozen parameters, in shared memory and in each rank's own."""
    ways = [Way(sharding, disk=False) for sharding in ("none", "optimizer", "gradients", "parameters")]
    if build is None:
        ways = [replace(ways[-1], disk=True, host="4MiB"), *ways[1:3]]
    settings = {"ways": ways} if build is None else {"ways": ways, "build": build}
    shared = values(two.run(several, tmp_path / "shared", **settings))
    private = values(two.run(several, tmp_path / "apart", apart=True, **settings))
    for one, other in zip(shared, private, strict=True):
        for found, expected in zip(one, other, strict=True):
            assert same(found, expected)
            assert found["norms"] == expected["norms"]


@pytest.mark.parametrize("far", [False, True])
def test_the_same_bits_in_small_pieces(far: bool, four: Team, tmp_path: Path) -> None:
    """Places of pieces are used again and again, and each rank hears of it in time."""
    ways = [Way("none", precision="bf16"), Way("parameters", precision="bf16", accumulate=2)]
    whole = values(four.run(several, tmp_path / "whole", ways=ways))
    cut = values(four.run(several, tmp_path / "cut", ways=ways, apart=far, piece=1 << 14))
    for one, other in zip(whole, cut, strict=True):
        assert all(same(found, expected) for found, expected in zip(one, other, strict=True))
        assert [found["norms"] for found in one] == [found["norms"] for found in other]


def summed(place: Place) -> tuple[int, int]:
    """Bytes that ranks share for what they send: in a backward pass, and after it."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    gc.collect()  # what engines of other tests have left
    before = memory_of_the_node()
    way, seen = Way(place.settings["sharding"]), []
    optimizer = offloaded(model, way, place)
    measure = Gradients.measure

    def noted(self: Gradients, store: Any) -> None:
        seen.append(memory_of_the_node() - before)
        measure(self, store)

    Gradients.measure = noted  # type: ignore[method-assign]
    try:
        optimizer.backward(model(torch.ones(2, 256)).square().mean())
    finally:
        Gradients.measure = measure  # type: ignore[method-assign]
    dist.barrier()  # each gives back its own
    after = memory_of_the_node() - before
    outcore.release(model)
    return max(seen), after


@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_memory_of_sums_is_given_back_with_the_pass(sharding: str, two: Team, tmp_path: Path) -> None:
    for most, after in values(two.run(summed, tmp_path, sharding=sharding)):
        assert most > 256 * 256 * 4
        assert after <= 4 * PAGE  # what each memory is known by


def memory_of_the_node() -> int:
    """Bytes of the memory that this process shares, once for all who do."""
    folder, found = Path("/proc/self/fd"), {}
    for entry in folder.iterdir():
        try:
            if "memfd:outcore" in os.readlink(entry):
                stat = entry.stat()
                found[stat.st_ino] = stat.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())


def inference(place: Place) -> dict[str, Any]:
    weights = place.settings.get("weights") or place.path / "weights"
    with torch.device("meta"):
        model = Stack(12)
    sharding = outcore.Sharding("none", timeout=20) if place.ranks > 1 else None
    with apart(place.settings.get("apart", False)):
        outcore.offload(
            model,
            device="cpu",
            weights=weights,
            budget=outcore.Budget(host=place.settings["host"]),
            precision=outcore.Precision("fp32"),
            sharding=sharding,
        )
    with torch.no_grad():
        out = model(torch.ones(2, 12, 32))
    found = {
        "out": out.clone(),
        "shared": memory_of_the_node(),
        "held": outcore.snapshot(model).held["host"],
        "weights": dict(outcore.weights(model)),
    }
    outcore.release(model)
    del model
    return found


def weights_in(folder: Path) -> int:
    """Write them; how many bytes they are."""
    folder.mkdir()
    torch.manual_seed(7)
    state = {name: p.detach() for name, p in Stack(12).named_parameters()}
    save_file(state, str(folder / "model.safetensors"))
    return sum(p.numel() * 4 for p in state.values())


def test_frozen_replicas_are_one(two: Team, tmp_path: Path) -> None:
    nbytes = weights_in(tmp_path / "weights")
    found = values(two.run(inference, tmp_path, host=f"{nbytes}"))  # half of it counts on each
    expected = alone(inference, tmp_path, host=f"{2 * nbytes}")
    for rank in found:
        assert torch.equal(rank["out"], expected["out"])
        assert all(torch.equal(value, expected["weights"][name]) for name, value in rank["weights"].items())
        assert rank["shared"] == pytest.approx(nbytes, rel=0.05)
        assert rank["held"] == pytest.approx(nbytes / 2, rel=0.1)


def loading(place: Place) -> tuple[bool, float]:
    """Whether ranks compared values, and the share of the elements that this one touched."""
    own = place.path / (f"own{place.rank}" if place.settings["copies"] else "own0")
    touched, compared = set[str](), []
    values_of = Directory.values
    init = Compared.__init__

    def counted(self: Directory, plan: Any) -> Any:
        for name, tensor in values_of(self, plan):
            touched.add(name)
            yield name, tensor

    def noted(self: Compared, *args: Any) -> None:
        compared.append(True)
        init(self, *args)

    Directory.values, Compared.__init__ = counted, noted  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            model = Stack(3)
        offloaded(model, Way(), place, weights=own)
        outcore.release(model)
    finally:
        Directory.values, Compared.__init__ = values_of, init  # type: ignore[method-assign]
    return bool(compared), len(touched)


@pytest.mark.parametrize("copies", [False, True])
def test_values_are_compared_unless_all_read_the_same_files(copies: bool, two: Team, tmp_path: Path) -> None:
    torch.manual_seed(7)
    state = {name: p.detach() for name, p in Stack(3).named_parameters()}
    for number in range(2):
        (tmp_path / f"own{number}").mkdir()
        save_file(state, str(tmp_path / f"own{number}" / "model.safetensors"))
    assert values(two.run(loading, tmp_path, copies=copies)) == [(copies, len(state))] * 2


def killed(place: Place) -> None:
    """Rank 1 is killed while it loads, or in a gather, where everybody else waits for the lock that it holds."""
    calls = 0
    where: Any = weights_of if place.settings["when"] == "loading" else SharedFrames
    name = "write" if place.settings["when"] == "loading" else "_fill"
    original = getattr(where, name)

    def striking(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4 and place.rank == 1:
            with args[0]._commons._memory.locked() if name == "_fill" else nullcontext():
                os.kill(os.getpid(), signal.SIGKILL)
        original(*args)

    setattr(where, name, striking)
    with torch.device("meta"):
        model = Stack(3)
    optimizer = offloaded(model, Way("parameters"), place, weights=place.path / "weights")
    assert isinstance(engine_of(model).stage._frames, SharedFrames)  # type: ignore[attr-defined]
    model(torch.ones(2, 12, 32)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("when", ["loading", "training"])
def test_a_rank_that_is_killed_leaves_nothing(when: str, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    state = {name: p.detach() for name, p in Stack(3).named_parameters()}
    save_file(state, str(tmp_path / "weights" / "model.safetensors"))
    before = set(os.listdir("/dev/shm"))
    one, other = run(killed, 2, tmp_path, patience=30, when=when)
    assert one.error is not None
    assert one.error[0] == "PeerError"
    assert "rank 1" in one.error[1]
    assert other.code == -signal.SIGKILL
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "outcore" in name]
