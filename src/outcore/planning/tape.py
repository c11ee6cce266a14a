"""What a traced step computed between two events: operators with the shapes of their tensors, to be run again.

[Note: Tape]
A rate per kind of operator misses what a kernel does at this very shape: a product of few rows reaches half of what a
square one does, a power is no multiplication, results that the heap has to fetch from the system cost more than those
it has. So where the machine is at hand, a traced span is run once with real tensors (`outcore.planning.replay`). A tape
is what it takes: operators below autograd in their order, and where in between each storage died, so that the heap
sees the same requests. Blocks that are alike have the same tape, numbers of storages apart, and are run once for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_map_only


class Ref(NamedTuple):
    """A tensor on a tape: a view of a numbered storage."""

    storage: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Ran(NamedTuple):
    """An operator with its arguments, in which tensors are `Ref`."""

    func: Any
    args: Any
    kwargs: Any
    result: Any


class Died(NamedTuple):
    """The last tensor of a storage went."""

    storage: int


class Timed(Protocol):
    """Something whose time can be found by running tapes."""

    def seconds(self, run: Callable[[Tape], float]) -> float:
        """How long it takes."""


@dataclass(eq=False)
class Tape:
    """Operators and deaths in their order. Implements `Timed`."""

    events: list[Ran | Died] = field(default_factory=list)

    def seconds(self, run: Callable[[Tape], float]) -> float:
        return run(self) if self.events else 0.0

    @cached_property
    def signature(self) -> str:
        """Equal for tapes that differ in the numbers of their storages alone; of a tape to which nothing is added any
        more."""
        numbers: dict[int, int] = {}

        def plain(ref: Ref) -> str:
            number = numbers.setdefault(ref.storage, len(numbers))
            return f"{number}:{ref[1:]}"

        digest = hashlib.sha256()
        for event in self.events:
            if isinstance(event, Ran):
                said = tree_map_only(Ref, plain, event[1:], is_leaf=_is_ref)
                digest.update(f"{event.func}{said}\n".encode())
            elif event.storage in numbers:
                digest.update(f"-{numbers[event.storage]}\n".encode())
        return digest.hexdigest()

    def outside(self) -> Iterator[Ref]:
        """The first view of each storage that is there before the tape begins."""
        met: set[int] = set()
        for event in self.events:
            if isinstance(event, Ran):
                for ref in refs((event.args, event.kwargs)):
                    if ref.storage not in met:
                        met.add(ref.storage)
                        yield ref
                met.update(ref.storage for ref in refs(event.result))

    @property
    def nbytes(self) -> int:
        """Of all storages on it."""
        return sum(
            {
                ref.storage: ref.nbytes for e in self.events if isinstance(e, Ran) for ref in refs(e[1:])
            }.values()
        )


@dataclass(frozen=True, eq=False)
class Stretched:
    """More of what a longer of two has beyond a shorter: so many times more. Implements `Timed`."""

    short: Timed
    long: Timed
    times: float

    def seconds(self, run: Callable[[Tape], float]) -> float:
        short, long = self.short.seconds(run), self.long.seconds(run)
        return max(long, long + (long - short) * self.times)


class Recording:
    """Writes tapes: tells storages apart by their address while they live."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._count = 0

    def ran(self, tape: Tape, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator ran."""
        ran = tree_map_only(torch.Tensor, self._ref, (args, kwargs, result))
        tape.events.append(Ran(func, *ran))

    def died(self, tape: Tape, address: int) -> None:
        """A storage went."""
        number = self._numbers.pop(address, None)
        if number is not None:
            tape.events.append(Died(number))

    def _ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = self._count
            self._count += 1
        return Ref(
            number,
            storage.nbytes(),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )


def refs(tree: Any) -> Iterator[Ref]:
    """All tensors of arguments."""
    if isinstance(tree, Ref):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from refs(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from refs(part)


def shapes_of(tree: Any) -> Any:
    """Arguments with tensors that have a shape and nothing else."""
    return tree_map_only(Ref, _shape_of, tree, is_leaf=_is_ref)


def _shape_of(ref: Ref) -> torch.Tensor:
    return torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device="meta")


def _is_ref(node: Any) -> bool:
    return isinstance(node, Ref)
