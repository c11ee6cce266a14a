"""Gradients summed over ranks.

[Note: Order of sums]
A rank gives each owner of a slice its own gradient of it, and each owner adds what it got in fp32, rank 0 first: so the
sum does not depend on which bytes came first, a run repeats bit by bit, and every way of sharding has the same bits.
Each element crosses the wire once, in the dtype in which it was collected: what a reduce-scatter takes at least. The
mean over ranks is taken of each such sum. What a step has of them is added up in fp32 in the order of its backward
passes, which is why all ways of sharding have the same bits, also under accumulation. Along the second dimension of a
mesh the owners' sums are added the same way.

[Note: Who has a gradient]
Ranks may miss different parameters (an expert that none of their rows went to). They say beforehand which ones they
have; a parameter that any rank has is updated on all, with zeros from the others, as one process would that had the
whole batch, and one that nobody has is not.

What fails here on one rank alone (a full disk) is raised at the end: until then it goes on with whatever it has, so
that the others don't wait for it. They hear of it in place of what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outcore.chunks.layout import ALIGN, Slot
from outcore.chunks.pool import Pool
from outcore.chunks.store import RunStore
from outcore.memory.host import Region, reserve
from outcore.optim.gradients import Gradients
from outcore.parallel.exchange import Exchange, Piece
from outcore.parallel.ranks import World


class Reduction:
    """Moves gradients from where this rank's backward left them to where those of all ranks are summed.

    Args:
        own: what this rank's backward passes leave, over whole runs.
        gradients: of all ranks, over what this rank keeps.
        stores: from the runs as they are kept to those in ``own``.
        exchange: among the ranks that keep different slices.
    """

    def __init__(
        self,
        own: Gradients,
        gradients: Gradients,
        stores: Mapping[RunStore, RunStore],
        world: World,
        pool: Pool,
        exchange: Exchange,
    ) -> None:
        self._own = own
        self._gradients = gradients
        self._stores = stores
        self._world = world
        self._pool = pool
        self._exchange = exchange
        self._totals: Region = reserve(_total_bytes(exchange.largest, world.slices.size))
        self._room = exchange.host_bytes(exchange.largest) + self._totals.nbytes
        self._taken = False
        self._faults: list[Exception] = []

    def has(self, stores: Sequence[RunStore]) -> bool:
        """Whether any gradient of these runs waits here."""
        return any(self._own.present(slot) for store in stores for slot in store.run.slots)

    def prepare(self) -> None:
        """Take room for what `reduce` needs, unless it is there: this may fail on one rank alone."""
        if not self._taken:
            self._pool.borrow(self._room)
            self._taken = True

    def rest(self) -> None:
        """Give the room back. All ranks are done with `reduce`."""
        if self._taken:
            self._exchange.release()
            self._totals.release()
            self._pool.repay(self._room)
            self._taken = False

    def reduce(self, stores: Sequence[RunStore], what: str) -> None:
        """Sum what waits for these runs; all ranks have agreed to this, and called `prepare`."""
        trained = [store for store in stores if store.run.trained]
        present, wide = self._presence(trained, what)
        for store in trained:
            slots = [slot for slot in store.run.slots if slot.index in present]
            if slots:
                self._reduce(store, slots, store in wide, what)
                self._attempt(lambda store=store: self._own.forget(self._stores[store]))  # type: ignore[misc]
                self._attempt(lambda store=store: self._gradients.measure(store))  # type: ignore[misc]
        faults, self._faults = self._faults, []
        if faults:
            raise faults[0]

    def _presence(self, stores: Sequence[RunStore], what: str) -> tuple[set[int], set[RunStore]]:
        """The parameters that any rank has a gradient of, and the runs of which any has it in fp32."""
        collected = self._own.collected
        said = bytearray()
        for store in stores:
            said.append(self._own.is_wide(self._stores[store]))
            said.extend(slot.index in collected for slot in store.run.slots)
        union = bytearray(len(said))
        for other in self._world.equal_bytes(bytes(said), what):
            union = bytearray(a | b for a, b in zip(union, other, strict=True))
        present, wide, at = set(), set(), 0
        for store in stores:
            if union[at]:
                wide.add(store)
            slots = store.run.slots
            present |= {slot.index for slot, has in zip(slots, union[at + 1 :], strict=False) if has}
            at += 1 + len(slots)
        return present, wide

    def _reduce(self, store: RunStore, slots: Sequence[Slot], wide: bool, what: str) -> None:
        slices, own = self._world.slices, self._stores[store]
        share = store.run.entire.share(slices.size)
        dtype = torch.float32 if wide else store.run.dtype
        step = self._exchange.largest // (slices.size * dtype.itemsize)
        under_way: Callable[[], None] | None = None
        for at in range(0, share, step):
            piece = self._exchange.next(min(step, share - at), dtype)
            self._attempt(lambda sent=piece.sent, at=at: self._collect(own, share, at, sent))  # type: ignore[misc]
            arrive = piece.begin(what)
            if under_way is not None:
                under_way()

            def finish(at: int = at, piece: Piece = piece, arrive: Callable[[], None] = arrive) -> None:
                arrive()
                received = piece.received
                if self._add_at_once(store, at, received, slots):
                    return
                total = self._totals.tensor[: 4 * received.shape[1]].view(torch.float32)
                add_in_order(received, total)
                self._add_replicas(total, what)
                total /= self._world.size
                self._deliver(store, share, at, total, slots, what)

            under_way = finish
        if under_way is not None:
            under_way()

    def _collect(self, own: RunStore, share: int, at: int, sent: torch.Tensor) -> None:
        for rank, part in enumerate(sent):
            start = rank * share + at
            known = max(0, min(len(part), own.run.numel - start))
            part[known:].zero_()
            if known:
                self._own.read_range(own, start, part[:known])

    def _add_at_once(self, store: RunStore, at: int, received: torch.Tensor, slots: Sequence[Slot]) -> bool:
        """Sum, divide and add in one pass over memory, where what arrived is for this rank alone: the same bits."""
        if self._world.replicas.size > 1 or store.run.whole is None or received.dtype is torch.float16:
            return False
        count = max(0, min(received.shape[1], store.run.numel - at))
        self._attempt(lambda: self._gradients.add_range(store, at, received[:, :count], slots))
        return True

    def _add_replicas(self, total: torch.Tensor, what: str) -> None:
        replicas = self._world.replicas
        if replicas.size > 1:
            table = total.new_empty(replicas.size, len(total))
            table[replicas.number] = total
            replicas.gather(table, what)
            add_in_order(table, total)

    def _deliver(
        self, store: RunStore, share: int, at: int, total: torch.Tensor, slots: Sequence[Slot], what: str
    ) -> None:
        """Add one piece of this rank's slice to what is kept here, or everyone's if all of them are."""
        slices, run = self._world.slices, store.run
        parts = [(run.first + at, total)]
        if run.whole is None:
            table = total.new_empty(slices.size, len(total))
            table[slices.number] = total
            slices.gather(table, what)
            parts = [(rank * share + at, row) for rank, row in enumerate(table)]
        for start, values in parts:
            local = start - run.first
            count = max(0, min(len(values), run.numel - local))
            self._attempt(
                lambda local=local, values=values[:count]: self._gradients.add_range(  # type: ignore[misc]
                    store, local, values, slots
                )
            )

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do what may fail here alone, unless something did."""
        if not self._faults:
            try:
                work()
            except Exception as error:
                self._faults.append(error)


def add_in_order(parts: torch.Tensor, total: torch.Tensor) -> None:
    """``total`` = the rows of ``parts``, shape [ranks, n], added in fp32 from the first to the last."""
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part


def piece_bytes(stores: Sequence[RunStore], ranks: int, most: int) -> int:
    """Bytes of a piece of what ranks have for each other: about ``most``, or half of it if that is less."""
    share = max((s.run.entire.share(ranks) for s in stores if s.run.trained), default=ALIGN)
    least = 4 * ranks * ALIGN
    return max(1, min(most, 2 * ranks * share) // least) * least


def staging_bytes(stores: Sequence[RunStore], ranks: int, exchange: type[Exchange]) -> int:
    """What a reduction needs beside the gradients."""
    piece = piece_bytes(stores, ranks, exchange.LARGEST)
    return exchange.host_bytes(piece) + _total_bytes(piece, ranks)


def _total_bytes(piece: int, ranks: int) -> int:
    """What the sum of a piece takes in fp32, if it came in half as many bytes."""
    return 2 * piece // ranks


def own_gradient_bytes(store: RunStore, summed: bool) -> int:
    """What this rank's gradients of a whole run take before ranks sum them; nothing if it is not trained.

    Args:
        summed: they are sums over the passes of a step, in fp32.
    """
    run = store.run.entire
    return run.numel * (4 if summed else run.dtype.itemsize) if run.trained else 0


def wider_bytes(store: RunStore) -> int:
    """How much more the sums over ranks of what is kept take, in fp32, than gradients in the run's dtype."""
    return sum(c.nbytes for c in store.totals) - sum(c.nbytes for c in store.gradients)


def largest_own_chunk(stores: Sequence[RunStore]) -> int:
    """The most that a chunk of them takes, with the fp32 sum that it may be widened to."""
    found = 0
    for run in (store.run.entire for store in stores if store.run.trained):
        width = run.dtype.itemsize + (0 if run.dtype is torch.float32 else 4)
        found = max(found, *(width * (stop - start) for start, stop in map(run.extent, range(run.chunks))))
    return found
