"""How long the spans of a traced step take: by a machine's rates, or by running them where they would be run.

[Note: Rates]
A span's time is the time of its matrix products and its attention at the machine's rates, and of everything else at
the bandwidth of its memory. Products also read and write what they multiply, and operators cost something to launch: an
accelerator does either beside computing, while on a CPU the few threads that compute wait for both.

[Note: Pages]
Where results come from is a good part of what operators take: pages that the heap kept are at hand, others have to be
found and cleared. What it keeps follows a run's budget (`outcore.memory.heap`), so spans are run under the same rule.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from outcore.memory.heap import USUAL, Rule, keep_little
from outcore.planning.recorder import Span
from outcore.planning.replay import HOST, Clock, replay
from outcore.planning.tape import Ran, Tape, shapes_of
from outcore.planning.timebook import Timebook
from outcore.planning.work import Work

if TYPE_CHECKING:
    from outcore.planning.machine import Machine

LONGEST = 3.0
"""Seconds by the machine's rates above which a span is not run: a plan should not take as long as the step."""

SHARE = 8
"""A span whose storages take more than this part of the machine's memory is not run either."""


class Timing(Protocol):
    """Says how long spans take."""

    taped: bool
    """Whether it needs what it takes to run them."""

    def within(self, host: int, roomy: bool) -> AbstractContextManager[None]:
        """Inside, spans take what they take in a run with so many bytes on the host; see [Note: Pages]."""

    def seconds(self, span: Span) -> float:
        """How long a span takes."""


class Rates:
    """By the rates that a machine states; see [Note: Rates]."""

    taped = False

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def within(self, host: int, roomy: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def seconds(self, span: Span) -> float:
        return seconds_of(span.work, self._machine)


class Replays:
    """By running each kind of span once where this machine computes; by rates, what can't be run.

    Args:
        book: what was found before.
        device: what computes.
    """

    taped = True

    def __init__(
        self, machine: Machine, book: Timebook, clock: Clock = time.perf_counter, device: torch.device = HOST
    ) -> None:
        self._machine = machine
        self._rates = Rates(machine)
        self._most = (machine.device or machine.host) // SHARE
        self._book = book
        self._clock = clock
        self._device = device
        self._rule = USUAL

    @contextmanager
    def within(self, host: int, roomy: bool) -> Iterator[None]:
        self._rule = Rule.of(host, roomy)
        self._rule.apply()
        try:
            yield
        finally:
            self._rule = USUAL
            keep_little()

    def seconds(self, span: Span) -> float:
        rated = self._rates.seconds(span)
        if rated > LONGEST:
            return rated
        try:
            return span.tape.seconds(self._run)
        except (RuntimeError, MemoryError, IndexError, NotImplementedError, ValueError, TypeError):
            return rated  # an operator that made-up values don't suit, or more memory than there is

    def _run(self, tape: Tape) -> float:
        signature = f"{tape.signature} {self._device} {self._rule.mapped} {self._rule.kept}"
        found = self._book.get(signature)
        if found is None:
            if tape.nbytes > self._most:
                raise MemoryError
            ran = replay(tape, self._clock, self._device, rule=self._rule)
            found = ran.seconds + seconds_of(work_of(ran.lacking), self._machine)
            self._book.put(signature, found)
        return found


def work_of(lacking: Sequence[Ran]) -> Work:
    """What operators on a tape would compute."""
    work = Work.none()
    for ran in lacking:
        work.note(ran.func, *map(shapes_of, (ran.args, ran.kwargs, ran.result)))
    return work


def seconds_of(work: Work, machine: Machine) -> float:
    """Seconds that work takes at a machine's rates; see [Note: Rates]."""
    slowest = min(machine.flops.values())  # for a precision that nobody stated a rate for
    products = 0.0
    for dtype, count in work.flops.items():
        attention = work.attention.get(dtype, 0)
        rate = machine.flops.get(dtype, slowest) * machine.reached
        products += (count - attention + attention / machine.attention) / rate
    rest, launches = work.nbytes / machine.compute_bandwidth, work.operators * machine.overhead
    if machine.device is None:
        return products + work.operands / machine.host_bandwidth + rest + launches
    return max(max(products, work.operands / machine.compute_bandwidth) + rest, launches)
