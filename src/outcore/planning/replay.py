"""Runs tapes with real tensors and takes their time.

[Note: What a device lacks]
A step is traced on the CPU, whose fused attention is an operator that no accelerator has. What the device lacks is not
run: tensors of the shapes on the tape stand for its results, and whoever asked is told what is missing from the time.

[Note: Cold]
What a block finds in a run was made or used long ago: its parameters in the pass before, what it saved for its backward
before all the other blocks. A processor has none of that in its caches any more. Tensors made for a tape, and those of
the round before, it would have; so the caches are filled with something else before each round.

[Note: Pages go round]
In a run, results that stay come from pages that the heap does not have: it gave them back in the pass before, and
within milliseconds somebody else gets them. So what a round leaves stays through the next one, and is given back to the
system before the one after, with what else the heap would not keep. To let all of it stay to the end would be simpler,
but then every round finds pages that nobody had: below a virtual machine each of them costs up to forty times as much
(12 us a page measured, 0.3 for one that went round), so a plan came out half as long again or not, by chance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.memory.device import finish
from outcore.memory.heap import USUAL, Rule, give_back
from outcore.model.draws import draws_kept
from outcore.planning.tape import Died, Ran, Ref, Tape, refs

ROUNDS = 5
"""The most rounds of a tape, after one that is not counted; their median is taken."""

SPAN = 1.2
"""Seconds after which no further round of a tape begins, unless there are two that count."""

CACHES = 64 << 20
"""Bytes that are more than the caches of a few cores hold."""

Clock = Callable[[], float]

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Replayed:
    """What became of a tape.

    Attributes:
        seconds: that it took.
        lacking: the operators that were not run, for the device has none of that kind.
    """

    seconds: float
    lacking: Sequence[Ran] = ()


def replay(
    tape: Tape, clock: Clock = time.perf_counter, device: torch.device = HOST, rule: Rule = USUAL
) -> Replayed:
    """How long a tape takes on a device, in the middle of several rounds.

    On the CPU, results that stay come from pages that the heap does not have, see [Note: Pages go round], while
    temporaries find those of the block before. Rounds begin with cold caches, see [Note: Cold]. An accelerator keeps
    its memory itself, and what is launched there is over when the clock is looked at.

    Args:
        rule: what the heap keeps. Where that is all, the next step's results find what those of the step before had,
            and so do those of a round here.

    Raises:
        RuntimeError: an operator can't be run with made-up values.
    """
    steps = [_Step(event, device) if isinstance(event, Ran) else event for event in tape.events]
    outside = list(tape.outside())
    left: list[torch.Tensor] = []
    other = torch.zeros(CACHES if device.type == "cpu" else 0, dtype=torch.uint8)
    found: list[float] = []
    begin = time.perf_counter()
    with draws_kept(device), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        while len(found) < 3 or (len(found) <= ROUNDS and time.perf_counter() - begin < SPAN):
            there = _Tensors(outside, device)
            other += 1
            finish(device)
            start = clock()
            for step in steps:
                if isinstance(step, Died):
                    there.drop(step.storage)
                else:
                    step.run(there)
            finish(device)
            found.append(clock() - start)
            if rule.kept >= 0 and device.type == "cpu":
                left[:] = there.without(outside)  # those of the round before are free now
                give_back(rule.kept)
    lacking = [step.ran for step in steps if isinstance(step, _Step) and step.lacks]
    return Replayed(statistics.median(found[1:]), lacking)


class _Tensors:
    """Real tensors in place of those of a tape."""

    def __init__(self, outside: Sequence[Ref], device: torch.device) -> None:
        self._bases: dict[int, torch.Tensor] = {ref.storage: _made(ref, device) for ref in outside}
        self._views: dict[int, dict[Ref, torch.Tensor]] = {}
        self._device = device

    def get(self, ref: Ref) -> torch.Tensor:
        views = self._views.setdefault(ref.storage, {})
        found = views.get(ref)
        if found is None:
            base = self._bases[ref.storage]
            flat = torch.empty(0, dtype=ref.dtype, device=self._device).set_(base.untyped_storage())
            found = views[ref] = flat.as_strided(ref.shape, ref.stride, ref.offset)
        return found

    def put(self, ref: Ref, tensor: torch.Tensor) -> None:
        self._bases.setdefault(ref.storage, tensor)
        self._views.setdefault(ref.storage, {})[ref] = tensor

    def stand_in(self, ref: Ref) -> None:
        """Something of its shape, where nothing was computed."""
        if ref.storage not in self._bases:
            self._bases[ref.storage] = _made(ref, self._device)

    def drop(self, storage: int) -> None:
        self._bases.pop(storage, None)
        self._views.pop(storage, None)

    def without(self, outside: Sequence[Ref]) -> list[torch.Tensor]:
        """What was made and is still there."""
        for ref in outside:
            self.drop(ref.storage)
        self._views.clear()
        return list(self._bases.values())


class _Step:
    """An operator, ready to be run.

    Attributes:
        lacks: it was tried, and the device has none of that kind.
    """

    def __init__(self, ran: Ran, device: torch.device) -> None:
        self.ran = ran
        self.lacks = False
        self._device = device
        self._result = list(refs(ran.result))

    def run(self, there: _Tensors) -> None:
        if self.lacks:
            self._stand_in(there)
            return
        try:
            result = self.ran.func(
                *[self._real(arg, there) for arg in self.ran.args],
                **{name: self._real(arg, there) for name, arg in self.ran.kwargs.items()},
            )
        except NotImplementedError:
            self.lacks = True
            self._stand_in(there)
            return
        if self._result:
            for ref, tensor in zip(self._result, _tensors(result), strict=True):
                there.put(ref, tensor)

    def _stand_in(self, there: _Tensors) -> None:
        for ref in self._result:
            there.stand_in(ref)

    def _real(self, arg: Any, there: _Tensors) -> Any:
        if isinstance(arg, Ref):
            return there.get(arg)
        if isinstance(arg, (list, tuple)):
            return [self._real(part, there) for part in arg]
        return self._device if isinstance(arg, torch.device) else arg


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in _tensors(part)]
    return []


def _made(ref: Ref, device: torch.device) -> torch.Tensor:
    """A storage with values that any operator takes: small numbers, the first row of any table, true."""
    flat = torch.empty(ref.nbytes // ref.dtype.itemsize, dtype=ref.dtype, device=device)
    if ref.dtype.is_floating_point:
        return flat.normal_(0.0, 0.02)
    return flat.fill_(1) if ref.dtype is torch.bool else flat.zero_()
