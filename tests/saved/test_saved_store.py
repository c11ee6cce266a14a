"""The store of saved tensors against clones: whatever the order of calls, bytes come back and the budget holds."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from faulty import Fault, FaultyFile
from outcore.chunks.chunk import Chunk
from outcore.chunks.pool import Pool
from outcore.chunks.replacers import NEVER, Belady
from outcore.chunks.store import pages
from outcore.errors import BudgetError, TierError
from outcore.memory.blockfile import MemoryFile
from outcore.memory.disk import DiskTier
from outcore.memory.frames import Frames
from outcore.memory.host import PAGE
from outcore.memory.ledger import Ledger
from outcore.model.owners import Owners
from outcore.model.saved.carriers import HostCarrier
from outcore.model.saved.store import SavedTensors

ROOM, UNITS = 6, 3
SHAPES = st.lists(
    st.tuples(st.sampled_from(["whole", "views", "turned", "part", "twice"]), st.integers(1, 3)),
    min_size=1,
    max_size=3,
)
"""What a block saves: how, and of how many pages."""


class Keep(torch.autograd.Function):
    """Saves what it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class Coming:
    """An order of uses that the test makes up."""

    now = 0

    def __init__(self) -> None:
        self.chunks: tuple[Chunk, ...] = ()
        self._asked = 0

    def revised(self) -> None:
        """Any may be."""

    def next_use(self, chunk: Chunk) -> int:
        return self.chunks.index(chunk) + 1 if chunk in self.chunks else NEVER

    @property
    def epoch(self) -> int:
        """Another one each time: the chunks may have changed."""
        self._asked += 1
        return self._asked

    def excused(self) -> Sequence[int]:
        return ()

    def needs(self, distance: int) -> Sequence[Chunk] | None:
        return self.chunks[distance - 1 : distance] or None


def tensors(how: str, count: int, first: int) -> list[torch.Tensor]:
    """What one entry of `SHAPES` stands for; ``first`` makes its numbers its own."""
    base = torch.arange(first, first + count * PAGE // 8, dtype=torch.int64).reshape(-1, 8)
    return {
        "whole": [base],
        "views": [base[:, :4], base[:, 4:], base[1:]],
        "turned": [base.t()],
        "part": [base[len(base) // 2 + 1 :]],
        "twice": [base, base],
    }[how]


@dataclass
class Node:
    """A node of a graph, and what it saved."""

    function: Any
    saved: list[torch.Tensor]
    nbytes: int


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.order = Ledger(), Coming()
        self.file = FaultyFile(MemoryFile(name="memory"))
        self.disk = DiskTier([self.file], ledger=self.ledger, budget=1 << 20)
        self.pool = Pool(self.ledger, self.disk, ROOM * PAGE, self.order, Belady(self.order))
        self.units: Any = [SimpleNamespace(index=k, opened=False, bindings=()) for k in range(UNITS)]
        carrier = HostCarrier(self.pool, Frames())
        self.saver = SavedTensors(
            carrier, self.pool, torch.device("cpu"), self.units, Owners(), lambda: iter(())
        )
        self.nodes: list[Node] = []
        self.seen: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.number, self.faulty, self.crowded = 0, False, False

    def may_refuse(self, nbytes: int) -> bool:
        """Whether so many bytes don't fit beside what is pinned."""
        self.saver.sweep()
        return self.pool.pinned + nbytes > self.pool.ceiling

    @rule(unit=st.integers(0, UNITS - 1), shapes=SHAPES, fails=st.booleans())
    def save(self, unit: int, shapes: list[tuple[str, int]], fails: bool) -> None:
        given = []
        for how, count in shapes:
            given += tensors(how, count, self.number)
            self.number += count * PAGE // 8
        saved = [tensor.clone() for tensor in given]
        refusable = self.may_refuse(max(count for _, count in shapes) * PAGE)
        x = torch.zeros(1, requires_grad=True)
        try:
            with self.saver.call(unit, f"b{unit}"):
                function = Keep.apply(x, *given).grad_fn
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return
        except BudgetError:
            assert refusable
            return
        except TierError:
            assert self.faulty
            return
        chunks = self.saver.expected(self.units[unit])
        self.nodes.append(Node(function, saved, sum(chunk.nbytes for chunk in chunks)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), over=st.booleans(), keep=st.booleans())
    def take(self, data: st.DataObject, over: bool, keep: bool) -> None:
        at = data.draw(st.integers(0, len(self.nodes) - 1))
        node = self.nodes.pop(at) if over else self.nodes[at]
        refusable = self.may_refuse(node.nbytes)
        try:
            found = list(node.function.saved_tensors)
        except BudgetError:
            assert refusable
        except TierError:
            assert self.faulty
        else:
            self.compare(found, node.saved)
            if keep:
                self.seen.append((found, node.saved))

    @precondition(lambda self: self.seen)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.compare(*self.seen.pop(data.draw(st.integers(0, len(self.seen) - 1))))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.nodes.pop(data.draw(st.integers(0, len(self.nodes) - 1)))

    @rule(unit=st.integers(0, UNITS - 1))
    def foresee(self, unit: int) -> None:
        with self.pool.lock:
            self.order.chunks = self.saver.expected(self.units[unit])
            self.pool.advance()

    @rule(count=st.integers(0, ROOM))
    def reserve(self, count: int) -> None:
        self.crowded = any(chunk.error is not None for chunk in self.pool._core.held)  # not told yet
        self.pool.reserve(count * PAGE, count * PAGE)

    @rule(fault=st.sampled_from([("read", "eio"), ("read", "flip"), ("write", "eio"), ("write", "enospc")]))
    def break_down(self, fault: Any) -> None:
        operation, kind = fault
        self.file.faults = (Fault(operation, self.file.counts[operation] + 1, kind),)
        self.faulty = True

    @staticmethod
    def compare(found: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one, other)

    @invariant()
    def within(self) -> None:
        for _ in range(2):  # what nobody looks at any more may have to be written first
            self.saver.sweep()
            self.pool.quiesce()
        struck = (fault for fault in self.file.faults if fault.at <= self.file.counts[fault.operation])
        self.crowded |= any(fault.operation == "write" for fault in struck)
        with self.pool.lock:
            seen = {t.untyped_storage().data_ptr(): t.untyped_storage() for ts, _ in self.seen for t in ts}
            pinned = sum(pages(storage.nbytes()) for storage in seen.values())
            assert self.pool.pinned == pinned
            assert self.pool.used == self.ledger.held("host")
            # what the disk refused stays until that was told, and room is asked for again
            assert self.pool.used <= max(self.pool.ceiling, pinned) or self.crowded

    def teardown(self) -> None:
        self.file.faults = ()
        self.seen.clear()
        self.saver.sweep()
        self.pool.reserve(0, 0)
        self.order.chunks = ()
        for node in self.nodes:
            for _ in range(2):  # what went wrong before is told once
                try:
                    self.take_all(node)
                    break
                except TierError:
                    assert self.faulty
            else:
                raise AssertionError("the bytes don't come back")
            del node
        self.nodes.clear()
        gc.collect()
        self.pool.quiesce()
        self.saver.shut()
        assert self.pool.pinned == 0
        assert not list(self.pool._core.held)
        assert self.ledger._kinds.get(("disk", "activations"), 0) == 0
        assert not self.saver._known
        assert not self.saver._storages
        self.pool.close()
        self.disk.close()
        assert self.ledger.held("host") == self.ledger.held("disk") == 0

    def take_all(self, node: Node) -> None:
        try:
            self.compare(list(node.function.saved_tensors), node.saved)
        except BudgetError:
            assert node.nbytes > ROOM * PAGE


TestSavedTensors = Machine.TestCase
TestSavedTensors.settings = settings(max_examples=15, stateful_step_count=20, deadline=None, derandomize=True)
