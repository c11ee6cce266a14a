"""The simulated step on a device: what is lifted ahead, and what the host's part of a copy costs."""

from __future__ import annotations

from dataclasses import replace

import outcore
from exact.families import FAMILIES
from outcore.planning.minimum import needs
from outcore.planning.outcome import Limits, Outcome
from outcore.planning.planner import Planner
from outcore.planning.settings import Settings
from outcore.planning.subject import Subject
from planning.accuracy import EMU

LLAMA = FAMILIES[1]
SETTINGS = Settings(2, 1, outcore.Activations(), 1 << 17)
ROOMY = Limits(1 << 30, 1 << 30, 1 << 30)


def simulated(link: float, use: float = 0.0, limits: Limits = ROOMY) -> Outcome:
    model = LLAMA.build().train()
    subject = Subject(model, outcore.AdamW(model.parameters()), LLAMA.batch(0), on_host=False)
    machine = replace(EMU, link_in=link, link_out=link, use=use, update=1e15)
    return Planner(subject, machine, limits).simulate(SETTINGS)


def tight() -> Limits:
    model = LLAMA.build().train()
    subject = Subject(model, outcore.AdamW(model.parameters()), LLAMA.batch(0), on_host=False)
    units, _ = subject.layout(SETTINGS.chunk_bytes)
    trace = subject.trace(SETTINGS.micro_batch, SETTINGS.activations)
    need = needs(units, subject.layout(SETTINGS.chunk_bytes)[1], False)
    return replace(ROOMY, device=need.device + trace.growth + subject.occupied)


def test_what_the_thread_has_updated_is_lifted_before_it_is_asked_for() -> None:
    plain = simulated(1e12)
    moved = plain.moved["device in"]
    found = simulated(4 * moved / plain.compute)  # what is lifted takes a quarter of what is computed
    assert found.busy["device in"] > 0.2 * plain.compute
    assert found.waited["device in"] < 0.5 * found.busy["device in"]  # that of the first unit


def test_handling_shows_where_the_device_has_nothing_left_to_do() -> None:
    """Behind a copy that it waits for; where copies are hidden, so is what the host does about them."""
    roomy, close = ROOMY, tight()
    seconds = 1e-3
    fast, slow = 1e12, 1e6
    exposed = simulated(slow, seconds, close).seconds - simulated(slow, 0.0, close).seconds
    assert exposed > 2 * seconds
    hidden = simulated(fast, 1e-7, roomy).seconds - simulated(fast, 0.0, roomy).seconds
    assert hidden < exposed / 10
