"""Runs tapes with real tensors and takes their time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from outcore.planning.tape import Died, Ran, Ref, Tape, refs

ROUNDS = 5
"""The most rounds of a tape, after one that is not counted; their median is taken."""

SPAN = 1.2
"""Seconds after which no further round of a tape begins, unless there are two that count."""

Clock = Callable[[], float]


def replay(tape: Tape, clock: Clock = time.perf_counter) -> float:
    """Seconds that a tape takes on the CPU, in the middle of several rounds.

    What a round leaves behind stays until the last: a run, too, has kept what the blocks before left, and results that
    stay come from fresh pages while temporaries find those of the block before.

    Raises:
        RuntimeError: an operator can't be run with made-up values.
    """
    steps = [_Step(event) if isinstance(event, Ran) else event for event in tape.events]
    outside = list(tape.outside())
    left: list[list[torch.Tensor]] = []
    found: list[float] = []
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        while len(found) < 3 or (len(found) <= ROUNDS and time.perf_counter() - begin < SPAN):
            there = _Tensors(outside)
            start = clock()
            for step in steps:
                if isinstance(step, Died):
                    there.drop(step.storage)
                else:
                    step.run(there)
            found.append(clock() - start)
            left.append(there.without(outside))
    return statistics.median(found[1:])


class _Tensors:
    """Real tensors in place of those of a tape."""

    def __init__(self, outside: list[Ref]) -> None:
        self._bases: dict[int, torch.Tensor] = {ref.storage: _made(ref) for ref in outside}
        self._views: dict[int, dict[Ref, torch.Tensor]] = {}

    def get(self, ref: Ref) -> torch.Tensor:
        views = self._views.setdefault(ref.storage, {})
        found = views.get(ref)
        if found is None:
            base = self._bases[ref.storage]
            flat = torch.empty(0, dtype=ref.dtype).set_(base.untyped_storage())
            found = views[ref] = flat.as_strided(ref.shape, ref.stride, ref.offset)
        return found

    def put(self, ref: Ref, tensor: torch.Tensor) -> None:
        self._bases.setdefault(ref.storage, tensor)
        self._views.setdefault(ref.storage, {})[ref] = tensor

    def drop(self, storage: int) -> None:
        self._bases.pop(storage, None)
        self._views.pop(storage, None)

    def without(self, outside: list[Ref]) -> list[torch.Tensor]:
        """What was made and is still there."""
        for ref in outside:
            self.drop(ref.storage)
        self._views.clear()
        return list(self._bases.values())


class _Step:
    """An operator, ready to be run."""

    def __init__(self, ran: Ran) -> None:
        self._func = ran.func
        self._args = ran.args
        self._kwargs = ran.kwargs
        self._result = list(refs(ran.result))

    def run(self, there: _Tensors) -> None:
        result = self._func(
            *[_real(arg, there) for arg in self._args],
            **{name: _real(arg, there) for name, arg in self._kwargs.items()},
        )
        if self._result:
            for ref, tensor in zip(self._result, _tensors(result), strict=True):
                there.put(ref, tensor)


def _real(arg: Any, there: _Tensors) -> Any:
    if isinstance(arg, Ref):
        return there.get(arg)
    if isinstance(arg, (list, tuple)):
        return [_real(part, there) for part in arg]
    return arg


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in _tensors(part)]
    return []


def _made(ref: Ref) -> torch.Tensor:
    """A storage with values that any operator takes: small numbers, the first row of any table, true."""
    flat = torch.empty(ref.nbytes // ref.dtype.itemsize, dtype=ref.dtype)
    if ref.dtype.is_floating_point:
        return flat.normal_(0.0, 0.02)
    return flat.fill_(1) if ref.dtype is torch.bool else flat.zero_()
