"""Each operation of a training step, a save and a load fails in turn: what comes of it.

Three places are made to fail: the swap file (``tier``), the file system that checkpoints are in (``files``) and memory
(``memory``). A case ends well with a typed error and everything as it should be afterwards, or with the same bits.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from checkpoint.faulty_files import READS, WRITES, FaultyFiles
from engine.twin import adamw
from exact.shapes import Stack
from faulty import KINDS, Fault, FaultyFile, install
from outcore.checkpoint import files as seam
from outcore.errors import OutcoreError
from outcore.offloaded import engine_of
from sweeping.allocations import Allocations

HOST, CHUNK = "2MiB", "128KiB"
LIMIT = 30
"""Seconds that a case may take; a healthy one takes a tenth of one."""

TIER = [(operation, kind) for operation, kinds in KINDS.items() for kind in (*kinds, "late")]
FILES = [
    *((operation, kind) for operation in WRITES for kind in ("EIO", "ENOSPC", "late")),
    *(("write", kind) for kind in ("short", "none")),
]
LOADED = [
    *((operation, kind) for operation in READS for kind in ("EIO", "late")),
    *(("read", kind) for kind in ("short", "none")),
]


OPERATIONS = {
    *(("tier", operation) for operation, _ in TIER),
    *(("files", operation) for operation in (*WRITES, *READS)),
    ("memory", "allocation"),
}


class Hang(BaseException):
    """A case took longer than `LIMIT`."""


@dataclass(frozen=True)
class Strike:
    """What fails: the ``at``-th of an operation of one place, once or from then on."""

    place: str
    operation: str
    kind: str
    at: int
    forever: bool

    def __str__(self) -> str:
        return f"{self.place} {self.operation} {self.at} {self.kind}{' for ever' if self.forever else ''}"


NOTHING = Strike("", "", "", 0, False)


@contextmanager
def struck(strike: Strike, tier: FaultyFile) -> Iterator[Callable[[str, str], int]]:
    """Let it fail within; gives what tells how many operations there were."""
    before = dict(tier.counts)
    memory = Allocations(*((strike.at, strike.forever) if strike.place == "memory" else ()))
    on_files = strike.place == "files"
    files = FaultyFiles(
        (strike.operation,) if on_files else (*WRITES, *READS),
        strike.at if on_files else 0,
        strike.kind,
        strike.forever,
    )
    if strike.place == "tier":
        at = before[strike.operation] + strike.at
        tier.faults = [Fault(strike.operation, at, strike.kind, strike.forever)]  # type: ignore[arg-type]

    def count(place: str, operation: str) -> int:
        if place == "tier":
            return tier.counts[operation] - before[operation]
        return memory.count if place == "memory" else files.log.count(operation)

    with ExitStack() as stack:
        stack.callback(setattr, tier, "faults", [])
        if strike.place in ("files", ""):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(seam, "SYSTEM", files)
        if strike.place in ("memory", ""):
            stack.enter_context(memory.counted())
        yield count
    assert not files.opened, files.opened


@contextmanager
def limited() -> Iterator[None]:
    """Raise `Hang` in whatever waits for too long."""

    def hang(*_: Any) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def step(model: Any, optimizer: outcore.Optimizer, number: int) -> float:
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(number))
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in outcore.weights(model)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def content(folder: Path) -> dict[str, bytes]:
    return {place.name: place.read_bytes() for place in sorted(folder.iterdir())}


def made(disk: Path) -> tuple[Any, outcore.Optimizer]:
    torch.manual_seed(7)
    model = Stack(2)
    optimizer = adamw(model.parameters())
    outcore.offload(model, optimizer, budget=outcore.Budget(host=HOST, disk=disk), chunk_size=CHUNK)
    return model, optimizer


@dataclass
class Run:
    """A model after two steps, most of it on disk, and its first checkpoint, to which each case goes back."""

    folder: Path
    tier: FaultyFile
    model: Any
    optimizer: outcore.Optimizer
    cases: int = 0
    expected: dict[str, Any] = field(default_factory=dict)
    first: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def target(self) -> Path:
        return self.folder / f"case-{self.cases}"

    def back(self) -> None:
        outcore.load(self.folder / "first", self.model, self.optimizer)

    def rest(self) -> None:
        engine = engine_of(self.model)
        assert all(chunk.pins == 0 for u in engine.units for s in u.stores for chunk in s.chunks()), "pinned"
        assert not any(thread.name == "outcore-save" for thread in threading.enumerate()), "a save goes on"

    def check_target(self, must: bool) -> None:
        if must or self.target.exists():
            outcore.verify(self.target)
            assert content(self.target) == self.expected["content"], "another checkpoint"


# What each scenario does under fault: the result that must be the same, if no error comes out of it.


def training(run: Run) -> Any:
    return [step(run.model, run.optimizer, number) for number in (2, 3)], state(run.model)


def saving(run: Run) -> Any:
    outcore.save(run.target, run.model, run.optimizer, extra={"step": 2})
    return [], {}


def saving_beside(run: Run) -> Any:
    saved = outcore.save(run.target, run.model, run.optimizer, extra={"step": 2}, wait=False)
    loss = step(run.model, run.optimizer, 2)
    saved.wait()
    return [loss], state(run.model)


def loading(run: Run) -> Any:
    assert outcore.load(run.folder / "first", run.model, run.optimizer) == {"step": 2}
    return [], state(run.model)


SCENARIOS: dict[str, tuple[Callable[[Run], Any], list[tuple[str, str, str]]]] = {
    "train": (training, [("tier", *each) for each in TIER]),
    "save": (saving, [*(("tier", *each) for each in TIER), *(("files", *each) for each in FILES)]),
    "save beside": (
        saving_beside,
        [*(("tier", *each) for each in TIER), *(("files", *each) for each in FILES)],
    ),
    "load": (loading, [*(("tier", *each) for each in TIER), *(("files", *each) for each in LOADED)]),
}


@contextmanager
def prepared(folder: Path) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        opened = install(patch)
        model, optimizer = made(folder)
        run = Run(folder, opened[0], model, optimizer)
        try:
            for number in range(2):
                step(model, optimizer, number)
            outcore.save(folder / "first", model, optimizer, extra={"step": 2})
            run.first = state(model)
            run.expected["content"] = content(folder / "first")
            yield run
        finally:
            outcore.release(model)


def expectation(run: Run, act: Callable[[Run], Any]) -> tuple[Any, dict[tuple[str, str], int]]:
    """The result without faults and how many operations it took; the numbers of a second time, as of all later."""
    for _ in range(2):
        run.cases += 1
        run.back()
        with struck(NOTHING, run.tier) as count:
            result = act(run)
            counts = {place: count(*place) for place in OPERATIONS}
        run.back()
    return result, counts


def opened_files() -> dict[str, str]:
    """What each descriptor of this process is of."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself, for one
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def case(run: Run, act: Callable[[Run], Any], expected: Any, strike: Strike) -> str:
    """One case. What came of it: the name of a typed error, or ``same``.

    Raises:
        AssertionError: something is not as it must be.
    """
    run.cases += 1
    descriptors = opened_files()
    came = "same"
    with limited():
        try:
            with struck(strike, run.tier):
                result = act(run)
        except OutcoreError as error:
            came = type(error).__name__
        else:
            assert result[0] == expected[0], f"other losses {result[0]} {expected[0]}"
            assert same(result[1], expected[1]), "other weights"
        run.optimizer.zero_grad()
        for _ in range(3):  # what went wrong behind the caller's back is told once, whoever comes by
            try:
                run.back()
                break
            except OutcoreError:
                continue
        else:
            run.back()
        assert same(state(run.model), run.first), "the checkpoint before was not restored"
        run.rest()
        run.check_target(must=came == "same" and act in (saving, saving_beside))
    left = {number: name for number, name in opened_files().items() if descriptors.get(number) != name}
    assert not left, f"descriptors are left: {left}"
    return came


def strikes(kinds: list[tuple[str, str, str]], counts: dict[tuple[str, str], int]) -> Iterator[Strike]:
    for place, operation, kind in [*kinds, ("memory", "allocation", "oom")]:
        for forever in (False, True):
            if kind == "eintr" and forever:
                continue  # an interrupted call is made again, as often as it takes
            for at in range(1, counts[place, operation] + 1):
                yield Strike(place, operation, kind, at, forever)


# A run from its first operation to its last: nothing of it is left, whatever fails.


def begun(folder: Path, faults: list[Fault], memory: Allocations) -> tuple[Any, FaultyFile | None]:
    """Offload, two steps, release: losses and weights, and the swap file, if it came to that."""
    chunks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        opened = install(patch, faults)
        torch.manual_seed(7)
        model = Stack(2)
        optimizer = adamw(model.parameters())
        try:
            with memory.counted():
                budget = outcore.Budget(host=HOST, disk=folder)
                outcore.offload(model, optimizer, budget=budget, chunk_size=CHUNK)
                chunks += [c for u in engine_of(model).units for s in u.stores for c in s.chunks()]
                losses = [step(model, optimizer, number) for number in range(2)]
                left = losses, state(model)
        finally:
            outcore.release(model)
            assert all(chunk.pins == 0 for chunk in chunks), "pinned"
            assert all(file.closed for file in opened), "the swap file is open"
    return left, opened[0] if opened else None


def begin_counts(folder: Path) -> tuple[Any, dict[tuple[str, str], int]]:
    memory = Allocations()
    expected, file = begun(folder, [], memory)
    assert file is not None
    counts = {("tier", operation): count for operation, count in file.counts.items()}
    return expected, counts | {("memory", "allocation"): memory.count}


def begin_case(folder: Path, expected: Any, strike: Strike) -> str:
    """As `case`, of a whole run."""
    threads, descriptors = set(threading.enumerate()), opened_files()
    of_memory = strike.place == "memory"
    faults = [] if of_memory else [Fault(strike.operation, strike.at, strike.kind, strike.forever)]  # type: ignore[arg-type]
    memory = Allocations(*((strike.at, strike.forever) if of_memory else ()))
    came = "same"
    with limited():
        try:
            left, _ = begun(folder, faults, memory)
        except OutcoreError as error:
            came = type(error).__name__
        else:
            assert left[0] == expected[0], "other losses"
            assert same(left[1], expected[1]), "other weights"
    running = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not running, f"threads are left: {running}"
    left = {number: name for number, name in opened_files().items() if descriptors.get(number) != name}
    assert not left, f"descriptors are left: {left}"
    return came


@dataclass
class Tally:
    """What came of all cases of a scenario."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())


BEGIN = "begin"
NAMES = (BEGIN, *SCENARIOS)


def sweep(
    folder: Path, name: str, stride: int = 1, offset: int = 0, told: Callable[[str], None] = lambda _: None
) -> Tally:
    """All cases of a scenario, or each ``stride``-th."""
    if name == BEGIN:
        return _sweep_begin(folder, stride, offset, told)
    act, kinds = SCENARIOS[name]
    tally, start = Tally(), time.perf_counter()
    with ExitStack() as stack:
        run, expected, counts = _ready(stack, folder / "0", act)
        for number, strike in enumerate(strikes(kinds, counts)):
            if (number - offset) % stride:
                continue
            try:
                outcome = case(run, act, expected, strike)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                tally.faults.append(f"{name}: {strike}: {type(error).__name__}: {error}")
                told(tally.faults[-1])
                outcome = "FAULT"
                run, expected, _ = _ready(
                    stack, folder / f"{number + 1}", act
                )  # whatever is left of the old one
            tally.outcomes[outcome] += 1
    tally.seconds = time.perf_counter() - start
    return tally


def _sweep_begin(folder: Path, stride: int, offset: int, told: Callable[[str], None]) -> Tally:
    tally, start = Tally(), time.perf_counter()
    begin_counts(folder)  # what is compiled or cached is, after this
    expected, counts = begin_counts(folder)
    for number, strike in enumerate(strikes([("tier", *each) for each in TIER], counts)):
        if (number - offset) % stride:
            continue
        try:
            outcome = begin_case(folder, expected, strike)
        except Exception as error:
            tally.faults.append(f"{BEGIN}: {strike}: {type(error).__name__}: {error}")
            told(tally.faults[-1])
            outcome = "FAULT"
        except Hang:
            tally.faults.append(f"{BEGIN}: {strike}: hangs")
            told(tally.faults[-1])
            outcome = "FAULT"
        tally.outcomes[outcome] += 1
    tally.seconds = time.perf_counter() - start
    return tally


def _ready(
    stack: ExitStack, folder: Path, act: Callable[[Run], Any]
) -> tuple[Run, Any, dict[tuple[str, str], int]]:
    with limited(), suppress(BaseException):
        stack.close()
    folder.mkdir(parents=True)
    run = stack.enter_context(prepared(folder))
    return run, *expectation(run, act)
