"""The ranks of a run: what they agree on before anything is done together, and how they learn of a failure.

[Note: Agreement]
Before each collective every rank gives a `Header`: what it is about to do, what went wrong with it if something did,
and a few bits. A rank that raises gives one word more, with what it raised, in the place of the next thing
that it would have done; so the others end there with a `PeerError` that names it, and none waits for bytes that don't
come. Ranks that are about to do different things find out in the same way. What can fail on one rank alone (memory,
disks) is done before the word, never between the word and the bytes.

A rank whose process ends takes its connections with it. Then a collective raises on its neighbours at once; they ask
who is missing (`outcore.parallel.rollcall`) and break their own connections, so that the others hear of it too.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from outcore.errors import PeerError, StateError, UsageError
from outcore.memory.ledger import WIRE, Ledger, beside
from outcore.parallel import told
from outcore.parallel.header import BITS, Header, compare
from outcore.parallel.pulse import Pulse
from outcore.parallel.rollcall import Life, RollCall
from outcore.parallel.sharding import Sharding
from outcore.parallel.wire import Wire

_AT_WORK = b"\1"
"""The bits of a rank that is not done yet with what is done together."""

Spread = Callable[[int], list[tuple[int, int]]]


class Ranks(Protocol):
    """Those who train one model together.

    Attributes:
        number: which of them this is.
        size: how many there are.
        neighbours: how many of them are on this machine.
    """

    number: int
    size: int
    neighbours: int

    def telling(self, doing: str) -> AbstractContextManager[None]:
        """What is raised inside is told to the others, who raise a `PeerError`."""

    def tell(self, doing: str, error: Exception) -> None:
        """The same for what is about to be raised."""

    def together(self, doing: str) -> AbstractContextManager[None]:
        """What is raised inside on one rank is raised on all of them at the end, and they can go on afterwards.

        Nothing inside may wait for other ranks. They wait for as long as it takes (`outcore.parallel.pulse`).
        """

    def agree(self, doing: str, bits: bytes = b"") -> list[bytes]:
        """Wait until all are about to do the same; returns everyone's bits, of which there may be `BITS` bytes.

        Raises:
            PeerError: one failed, ended, or is about to do something else.
        """

    def all_sums(self, sums: list[float]) -> list[float]:
        """The numbers of all ranks that keep different slices."""

    def first_of(self, word: str | None) -> str | None:
        """The word of the first rank that has one."""

    def words(self, data: bytes, what: str) -> list[bytes]:
        """Everyone's bytes, of any length."""

    def nearby(self, data: bytes, what: str) -> list[bytes]:
        """Those of the ranks on this machine. All ranks call this together."""

    def complete(self, values: torch.Tensor, spread: Spread, what: str) -> None:
        """Bring the elements of a tensor that other ranks keep.

        Args:
            values: flat; this rank's elements are there.
            spread: from a number of ranks, first and one past the last element that each keeps.
        """

    def leave(self) -> None:
        """The end."""


class Alone:
    """One process."""

    number, size, neighbours = 0, 1, 1

    def telling(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext()

    def tell(self, doing: str, error: Exception) -> None:
        pass

    def together(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, doing: str, bits: bytes = b"") -> list[bytes]:
        return [bits]

    def all_sums(self, sums: list[float]) -> list[float]:
        return sums

    def first_of(self, word: str | None) -> str | None:
        return word

    def words(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def nearby(self, data: bytes, what: str) -> list[bytes]:
        return [data]

    def complete(self, values: torch.Tensor, spread: Spread, what: str) -> None:
        pass

    def leave(self) -> None:
        pass


class World:
    """Several processes; see [Note: Agreement].

    Attributes:
        sharding: as the user says.
        slices: the ranks among which states are cut. With ``"none"`` they are not, but gradients are summed as if.
        gathers: the same as ``slices``, over connections of their own, for what goes on beside everything else.
        replicas: the ranks that keep the same slice as this one, which is one rank unless the mesh has two dimensions.
        row: the numbers of those in ``slices``, in their order.
        together_here: whether all of them are on this machine.
    """

    def __init__(self, sharding: Sharding) -> None:
        ranks, rows = _members(sharding)
        own = dist.get_rank()
        if sorted(ranks) != list(range(dist.get_world_size())):
            raise UsageError(
                f"the mesh has {len(ranks)} of the {dist.get_world_size()} ranks: it must have each of them once"
            )
        self.sharding = sharding
        self.number, self.size = ranks.index(own), len(ranks)
        self.ledger: Ledger | None = None
        self._sequence = 0
        self._speaking = threading.Lock()
        self._broken: PeerError | None = None
        timeout = timedelta(seconds=sharding.timeout)
        self._wires: list[Wire] = []
        self.slices = self.replicas = self._all = self._make([ranks], own, timeout)
        self.gathers = self._make(rows, own, timeout, beside=True)
        if len(rows) > 1:
            self.slices = self._make(rows, own, timeout)
            self.replicas = self._make([list(column) for column in zip(*rows, strict=True)], own, timeout)
        else:
            self.replicas = Wire(None, [own], self._lost)
        lives: list[Any] = [None] * self.size
        dist.all_gather_object(lives, Life.own(), group=self._all.group)
        self._near = [n for n, life in enumerate(lives) if life.host == lives[self.number].host]
        self.neighbours = len(self._near)
        self.row = [ranks.index(member) for member in self.slices.members]
        self.together_here = all(lives[n].host == lives[self.number].host for n in self.row)
        name = hashlib.sha256(repr((lives, _count())).encode()).hexdigest()[:16]
        self._roll = RollCall(name, self.number, lives)

    def _make(self, parts: list[list[int]], own: int, timeout: timedelta, beside: bool = False) -> Wire:
        """This rank's group among several that all ranks make."""
        found: Wire | None = None
        for part in parts:
            group = dist.new_group(part, timeout=timeout, backend="gloo")
            if own in part:
                found = Wire(group, part, self._lost, beside)
                self._wires.append(found)
        assert found is not None
        return found

    def report_to(self, ledger: Ledger) -> None:
        """Enter what crosses the wire in a ledger."""
        ledger.list_link(WIRE)
        self.ledger = ledger
        for wire in self._wires:
            wire.ledger = ledger

    # -- agreement --------------------------------------------------------------------------------

    def agree(self, doing: str, bits: bytes = b"") -> list[bytes]:
        return [header.bits for header in self._exchange(doing, "", bits)]

    def _exchange(self, doing: str, fault: str, bits: bytes) -> list[Header]:
        with self._speaking:  # one word after the other, also of those that `together` says beside
            return self._in_turn(doing, fault, bits)

    def _in_turn(self, doing: str, fault: str, bits: bytes) -> list[Header]:
        if self._broken is not None:
            raise StateError(
                f"the ranks of this model have parted: {self._broken}; start all of them again"
            ) from self._broken
        assert len(bits) <= BITS
        own = Header(self._sequence, doing, fault, bits)
        self._sequence += 1
        headers = [Header.unpack(said) for said in self.equal_bytes(own.pack(), doing)]
        error = compare(headers, self.number)
        if error is not None:
            self._broken = error
            if not fault:
                raise error
        return headers

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            self.tell(doing, error)
            raise

    def tell(self, doing: str, error: Exception) -> None:
        if self._broken is None:
            with suppress(PeerError):
                self._exchange(doing, f"{type(error).__name__}: {error}", b"")

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        fault: Exception | None = None

        def sign() -> None:
            with beside():
                self._exchange(doing, "", _AT_WORK)

        with Pulse(sign, self.sharding.timeout, self._all.waiting) as pulse:
            try:
                yield
            except PeerError:
                raise
            except Exception as error:
                fault = error
        if pulse.heard is not None:
            raise pulse.heard from fault
        while any(self.agree(doing)):  # somebody is at work
            pass
        found = self.all_bytes(b"" if fault is None else told.pack(fault), doing)
        if fault is not None:
            raise fault
        for rank, said in enumerate(found):
            if said:
                raise told.raised(rank, doing, said)

    def _lost(self, doing: str, heard: str) -> PeerError:
        """A connection broke: who is missing. This rank's other connections are broken too."""
        if self._broken is not None:
            return self._broken
        absence = self._roll.missing(doing)
        message = f"{absence.said} in {doing}: {absence.why} (rank {self.number} heard: {heard})"
        self._broken = PeerError(absence.ranks[0] if absence.ranks else -1, doing, message)
        self.leave()
        return self._broken

    def leave(self) -> None:
        """The end: give the connections back."""
        for wire in self._wires:
            wire.hang_up()

    # -- small things said to all -------------------------------------------------------------------

    def all_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Everyone's bytes, of any length; the ranks have agreed to this."""
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.number] = len(data)
        self._all.gather(lengths, what)
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        found = self.equal_bytes(data.ljust(longest, b"\0"), what)
        return [said[: int(n)] for said, n in zip(found, lengths, strict=True)]

    def equal_bytes(self, data: bytes, what: str) -> list[bytes]:
        """The same where all ranks give equally many."""
        table = torch.zeros(self.size, len(data), dtype=torch.uint8)
        if data:
            table[self.number] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._all.gather(table, what)
        return [bytes(row.tolist()) for row in table]

    def words(self, data: bytes, what: str) -> list[bytes]:
        self.agree(what)
        return self.all_bytes(data, what)

    def nearby(self, data: bytes, what: str) -> list[bytes]:
        said = self.words(data, what)
        return [said[n] for n in self._near]

    def all_sums(self, sums: list[float]) -> list[float]:
        what = "the gradient norm"
        self.agree(what)
        if self.sharding.states == "none":
            return sums
        first = self.number < self.slices.size  # of the replicas, each of which keeps every slice once
        data = torch.tensor(sums if first else [], dtype=torch.float64)
        found = self.all_bytes(data.numpy().tobytes(), what)
        return [
            value
            for part in found
            if part
            for value in torch.frombuffer(bytearray(part), dtype=torch.float64).tolist()
        ]

    def first_of(self, word: str | None) -> str | None:
        what = "where a gradient is not finite"
        found = self.words((word or "").encode(), what)
        return next((said.decode() for said in found if said), None)

    def complete(self, values: torch.Tensor, spread: Spread, what: str) -> None:
        found = spread(self.slices.size)
        if found:
            self.agree(what)
            for rank, (start, stop) in enumerate(found):
                if start < stop:
                    self.slices.broadcast(values[start:stop], rank, what)

    def same(self, data: bytes, what: str, remedy: str) -> None:
        """Check that all ranks have the same.

        Raises:
            UsageError: one has something else; all of them raise it.
        """
        found = self.agree(what, hashlib.sha256(data).digest())
        for rank, said in enumerate(found):
            if said != found[0]:
                raise UsageError(f"{what}: rank {rank} has another than rank 0; {remedy}")


def _members(sharding: Sharding) -> tuple[list[int], list[list[int]]]:
    """All ranks, and the rows within which states are sharded."""
    if sharding.mesh is None:
        everyone = list(range(dist.get_world_size()))
        return everyone, [everyone]
    table = sharding.mesh.mesh.reshape(-1, sharding.mesh.mesh.shape[-1])
    return table.reshape(-1).tolist(), table.tolist()


_worlds = 0


def _count() -> int:
    """How many worlds this process made: all ranks make the same ones."""
    global _worlds
    _worlds += 1
    return _worlds


def join(sharding: Sharding | None, refusal: str = "") -> Ranks:
    """The ranks of this run. All of them call this together.

    Args:
        refusal: why there can't be several.

    Raises:
        UsageError: there are several, and can't be; or a mesh without some of them.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Alone()
    if refusal:
        raise UsageError(refusal)
    return World(sharding or Sharding())
