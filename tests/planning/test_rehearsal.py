"""A step traced without values has the windows and the bytes of a real one."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

import outcore
from exact.families import FAMILIES
from exact.shapes import Shape
from outcore.errors import ModelError
from outcore.offloaded import engine_of
from outcore.planning.recorder import CATEGORIES, WITHIN, Span
from outcore.planning.subject import Subject
from planning.accuracy import Case

SHARE = {"bert": 0.03, "mixtral": 0.06}
"""What values decide: bert's mask hides something here, and mixtral's routing isn't even."""


def windows(spans: list[Span]) -> list[tuple[object, int]]:
    """Keys and peaks from one opening or closing to the next."""
    found: list[tuple[object, int]] = []
    for span in spans:
        if span.event[0] in WITHIN:
            found[-1] = (found[-1][0], max(found[-1][1], span.peak))
        else:
            found.append((span.event, span.peak))
    return found


@pytest.mark.parametrize("way", ["keep", "recompute"])
@pytest.mark.parametrize("shape", FAMILIES, ids=lambda shape: shape.name)
def test_windows_are_those_of_a_run(shape: Shape, way: str) -> None:
    case = Case(shape.build, shape.batch(0), recomputes=way == "recompute")
    trace = case.subject().trace(2, case.activations)
    model = case.model()
    optimizer = outcore.AdamW(model.parameters())
    outcore.offload(
        model, optimizer, budget=outcore.Budget(host="256MiB"), activations=outcore.Activations(way)
    )
    shape.loss(model(**shape.batch(0))).backward()
    engine_of(model).gauge.end()
    [[profile]] = engine_of(model).gauge._known.values()  # type: ignore[attr-defined]
    outcore.release(model)
    planned = windows(trace.spans)
    assert [key for key, _ in planned[1:]] == profile.keys[1:]
    assert trace.peak == pytest.approx(profile.peak, rel=SHARE.get(shape.name, 0), abs=128)
    if shape.name not in SHARE:
        assert [peak for _, peak in planned] == pytest.approx(profile.peaks, rel=0, abs=128)


def test_categories_add_up_to_the_peak() -> None:
    shape = FAMILIES[0]
    for span in Case(shape.build, shape.batch(0)).subject().trace(2, outcore.Activations("recompute")).spans:
        assert sum(span.parts) == span.peak
        assert len(span.parts) == len(CATEGORIES)


def test_work_is_counted() -> None:
    """Two products forward, and two for each of them in backward but the first, whose input needs no gradient."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16, bias=False))
    subject = Subject(model, outcore.AdamW(model.parameters()), {"input": torch.empty(8, 64)})
    work = subject.trace(8, outcore.Activations()).work
    first, second = 2 * 8 * 64 * 32, 2 * 8 * 32 * 16
    assert work.flops == {"bf16": 2 * first + 3 * second}
    half = subject.trace(4, outcore.Activations()).work
    assert half.flops["bf16"] * 2 == work.flops["bf16"]


def test_the_model_is_left_as_it_was() -> None:
    shape = FAMILIES[0]
    model = shape.build().train()
    before = {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()}
    forwards = [vars(m).get("forward") for m in model.modules()]
    Subject(model, outcore.AdamW(model.parameters()), shape.batch(0)).trace(
        2, outcore.Activations("recompute")
    )
    assert {name: (id(p), p.data_ptr(), p.dtype) for name, p in model.named_parameters()} == before
    assert [vars(m).get("forward") for m in model.modules()] == forwards
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_model_that_fails_says_how() -> None:
    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise ValueError("not like this\nat all")

    model = Picky(4, 4)
    with pytest.raises(ModelError, match=r"can't be traced without values \(ValueError: not like this\)"):
        Subject(model, outcore.AdamW(model.parameters()), {"input": torch.empty(2, 4)}).trace(
            2, outcore.Activations()
        )
    assert not model.weight.is_meta


def test_a_part_that_is_frozen_and_a_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.layers[0].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.layers[0], self.layers[1], self.layers[1]):
                x = layer(x).relu()
            return x

    model = Twice()
    subject = Subject(model, outcore.AdamW(model.parameters()), {"x": torch.empty(2, 8)})
    events = [span.event for span in subject.trace(2, outcore.Activations()).spans]
    assert events.count(("forward", 1)) == 2
    assert events.count(("gradient", 1)) == 1
    assert ("gradient", 0) not in events
    assert subject.facts.parameters == 2 * subject.facts.trained == 144


class Asking(nn.Module):
    """Asks whether all elements are something, again and again, and in between whether a number is another."""

    answers: ClassVar[set[tuple[bool, bool]]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = self.inner(input)
        number = found.detach().sum()
        for _ in range(20):
            every = bool((found == found).all())
            self.answers.add((every, bool(number == 1)))
        return found


def test_an_answer_is_not_taken_for_that_of_a_tensor_that_is_gone() -> None:
    """Storages that die leave their addresses to the next ones."""
    model = Asking()
    subject = Subject(model, outcore.AdamW(model.parameters()), {"input": torch.empty(2, 8)})
    subject.trace(2, outcore.Activations())
    assert Asking.answers == {(True, False)}
