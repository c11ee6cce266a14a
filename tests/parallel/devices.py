"""What ranks do in the tests of accelerators: the loops of `parallel.loops` on the emulated one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from emulated import accelerator
from outcore.errors import BudgetError
from outcore.memory.device import Offers
from outcore.model import fresh_stage, sites
from outcore.model.device_stage import DeviceStage
from outcore.model.gathering import Gathering
from outcore.model.host_frames import HostFrames
from outcore.offloaded import engine_of
from outcore.optim.gradients import Gradients
from parallel.loops import Way, apart, stack, train
from parallel.test_parallel_bytes import held, large, steps
from parallel.together import Place


@dataclass(frozen=True)
class Lift:
    """A way to train, and the device of each rank.

    Attributes:
        kinds: where each rank computes; the first one again where there are more ranks.
        memory: the budget of the emulated accelerator.
        microbatch: rows of a slice, if blocks run in slices.
    """

    way: Way = field(default_factory=Way)
    kinds: tuple[str, ...] = (accelerator.NAME,)
    memory: str = "8MiB"
    microbatch: int | None = None

    def kind(self, place: Place) -> str:
        return self.kinds[place.rank % len(self.kinds)]


@contextmanager
def computing_on(kind: str, **settings: Any) -> Iterator[None]:
    """The emulated accelerator is there, if it is asked for; races in it are raised at the end."""
    if kind == "cpu":
        yield
        return
    gc.collect()  # of the models before there may be a few bytes still
    accelerator.configure(**settings)
    try:
        yield
        torch.accelerator.synchronize()
        accelerator.check()
        assert accelerator.races() == []
    finally:
        accelerator.reset()


def lifted(model: nn.Module, lift: Lift, place: Place, **settings: Any) -> Any:
    way, kind = lift.way, lift.kind(place)
    optimizer = outcore.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.1)
    outcore.offload(
        model,
        optimizer,
        budget=outcore.Budget(
            device=None if kind == "cpu" else lift.memory,
            host=way.host,
            disk=place.disk if way.disk else None,
        ),
        precision=outcore.Precision(way.precision),  # type: ignore[arg-type]
        activations=outcore.Activations(way.activations, lift.microbatch),  # type: ignore[arg-type]
        chunk_size="128KiB",
        device=kind,
        sharding=outcore.Sharding(way.sharding, timeout=20) if place.ranks > 1 else None,  # type: ignore[arg-type]
        **settings,
    )
    return optimizer


def trained(place: Place) -> list[dict[str, Any]]:
    """Train in one way after the other; what the emulated accelerator itself counted is added."""
    found = []
    for lift in place.settings["lifts"]:
        kind = lift.kind(place)
        with computing_on(kind, **place.settings.get("emulator", {})):
            model = place.settings.get("build", stack)()
            optimizer = lifted(model, lift, place)
            result = train(model, optimizer, lift.way, place)
            result["snapshot"] = outcore.snapshot(model)
            result["counted"] = 0 if kind == "cpu" else torch.accelerator.max_memory_allocated()
            outcore.release(model)
            del model, optimizer
        found.append(result)
    return found


def trained_without_streams(place: Place) -> list[dict[str, Any]]:
    """`trained`, where the emulated accelerator has no streams and its storages keep their size."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sites, fresh_stage):
            patch.setattr(module, "offers", lambda device: Offers(False, False, storages=True))
        return trained(place)


def gathered_ahead(place: Place) -> list[Any]:
    """Gathers and lifts before their use, with and without prefetch, and what came of each run.

    Each gather has ended when it began, so that what is lifted ahead does not depend on time.
    """
    counts = {"gathers": 0, "lifts": 0}
    propose, gather, lift = Gathering._propose, HostFrames.gather, DeviceStage._lift

    def proposed(gathering: Gathering, unit: Any) -> Any:
        found = propose(gathering, unit)
        counts["gathers"] += found is not None
        return found

    def gathers(frames: HostFrames, unit: Any, what: str) -> Future[None]:
        arrival = gather(frames, unit, what)
        wait([arrival])
        return arrival

    def lifts(stage: DeviceStage, unit: Any) -> None:
        counts["lifts"] += unit.opened == 0
        lift(stage, unit)

    found: list[Any] = []
    Gathering._propose, HostFrames.gather, DeviceStage._lift = proposed, gathers, lifts  # type: ignore[method-assign]
    try:
        for prefetch in (True, False):
            with computing_on(accelerator.NAME):
                model = stack()
                optimizer = lifted(model, Lift(), place, prefetch=prefetch)
                counts.update(gathers=0, lifts=0)
                result = train(model, optimizer, Way(), place)
                found.append((result, dict(counts)))
                outcore.release(model)
                del model, optimizer
    finally:
        Gathering._propose, HostFrames.gather, DeviceStage._lift = propose, gather, lift  # type: ignore[method-assign]
    return found


def measured(place: Place) -> tuple[int, int]:
    """Runs whose gradients were measured for a norm: of the sums over ranks, and of what this rank has by itself."""
    seen: list[Gradients] = []
    measure = Gradients.measure

    def measures(gradients: Gradients, store: Any) -> None:
        seen.append(gradients)
        measure(gradients, store)

    with pytest.MonkeyPatch.context() as patch, computing_on(accelerator.NAME):
        patch.setattr(Gradients, "measure", measures)
        model = stack()
        optimizer = lifted(model, Lift(), place)
        train(model, optimizer, Way(), place)
        sums = seen.count(engine_of(model).gradients)
        outcore.release(model)
        del model, optimizer
    return sums, len(seen) - sums


def states_of(place: Place) -> dict[str, Any]:
    """Bytes that this rank's tiers hold between steps, bytes received in a step, and what `capacity` must be."""
    with computing_on(accelerator.NAME):
        model = large()
        with apart(place.settings["apart"]):
            optimizer = lifted(model, Lift(Way(host="256MiB")), place)
        steps(model, optimizer, 1)
        before = outcore.snapshot(model).moved.get("wire", 0)
        steps(model, optimizer, 2)
        engine_of(model).settle()
        seen = outcore.snapshot(model)
        found = {
            "host": held(model),
            "device": seen.held["device"],
            "wire": (seen.moved.get("wire", 0) - before) / 2,
            "peak": seen.peak["device"],
        }
        outcore.release(model)
        del model, optimizer
    return found


def on_a_device_as_large_as(place: Place) -> None:
    """A run passes where budget and capacity are what another one's peak was, and less is refused."""
    peak = place.settings["peak"]
    with computing_on(accelerator.NAME, capacity=peak):
        model = large()
        optimizer = lifted(model, Lift(Way(host="256MiB"), memory=str(peak)), place)
        steps(model, optimizer, 2)
        assert torch.accelerator.max_memory_allocated() <= peak
        outcore.release(model)
        del model, optimizer
    with computing_on(accelerator.NAME), pytest.raises(BudgetError) as refused:
        lifted(large(), Lift(memory="20KiB"), place)
    assert refused.value.tier == "device"


def one_device_fails(place: Place) -> None:
    """The accelerator of the last rank has no memory left in the middle of a run."""
    kind = accelerator.NAME if place.rank == place.ranks - 1 else place.settings["others"]
    lift = Lift(Way(place.settings["stage"], steps=1), (kind,))
    with computing_on(kind):
        model = stack()
        optimizer = lifted(model, lift, place)
        train(model, optimizer, lift.way, place)
        if place.rank == place.ranks - 1:
            engine = engine_of(model)
            assert isinstance(engine.stage, DeviceStage)
            engine.stage._budget = 1000
        train(model, optimizer, lift.way, place, first=1)
