"""Gradients between backward and update: summed per chunk, and measured for the norm as they arrive.

[Note: Gradient width]
The first contribution of a step is kept as backward made it, in the parameter's dtype: nothing is
gained by widening it. With a second contribution (gradient accumulation) the chunk is widened to fp32 and
stays so until the update, so that bf16 sums don't lose small terms. A contribution that is a sum itself, over
the slices of a pass (`outcore.model.slices.block`), comes in fp32 and widens the chunk at once. The result
depends on the order of backward passes alone, never on where a chunk lies.

[Note: Norm]
Each time a chunk is complete, float64 sums of squares are taken for each block of `BLOCK` elements, while
its bytes are still at hand. The norm is the square root of their exact sum (`math.fsum`), so it has the same
bits for every chunk size, tier split and number of threads, and costs no pass of its own. Where ranks keep slices,
each measures its own, and the sums of all ranks are added in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.layout import BLOCK, Slot
from outcore.chunks.pool import Access, Guard, Pool
from outcore.chunks.store import RunStore
from outcore.memory.refusal import allocating
from outcore.optim.collected import Collected
from outcore.optim.kernels import GradTransform, Workers, accumulate, add_mean, sum_of_squares

PLAIN = GradTransform()


Sums = Callable[[list[float]], list[float]]
"""From the sums of squares of what is kept here, those of all that is kept anywhere."""


def just_these(sums: list[float]) -> list[float]:
    """Everything is kept here."""
    return sums


class Gradients:
    """The gradients that backward passes leave for the next step, over all trained runs.

    Args:
        everyones: asked for the sums of all ranks.
    """

    def __init__(
        self, stores: Iterable[RunStore], pool: Pool, workers: Workers, everyones: Sums = just_these
    ) -> None:
        self._everyones = everyones
        self._stores = tuple(store for store in stores if store.run.trained)
        self._pool = pool
        self._workers = workers
        self._now = Collected(pool)
        self._unmeasured: dict[RunStore, set[int]] = {}
        self._sums: dict[tuple[RunStore, int], torch.Tensor] = {}

    def take(self) -> Collected:
        """Hand the gradients over to an update; from here on others are collected."""
        taken, self._now = self._now, Collected(self._pool)
        self._unmeasured.clear()
        self._sums.clear()
        return taken

    def expected(self, stores: Iterable[RunStore]) -> tuple[Chunk, ...]:
        """The chunks that the next gradients of these runs go to."""
        return tuple(self._now.chunk(store, k) for store in stores for k in range(len(store.gradients)))

    # -- arriving ---------------------------------------------------------------------------------

    def add(self, store: RunStore, slot: Slot, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient, a contiguous host tensor of the run's dtype or of fp32."""
        flat = gradient.reshape(-1)
        wide = gradient.dtype is not store.run.dtype
        for k in store.run.covering(slot):
            for segment in store.run.segments(k):
                if segment.slot is slot:
                    piece = flat[segment.first : segment.first + segment.stop - segment.start]
                    again = slot.index in self._now.present
                    self._add(store, k, segment.start, segment.stop, piece, again or wide)
        self._now.present.add(slot.index)

    def _add(self, store: RunStore, k: int, start: int, stop: int, piece: torch.Tensor, widen: bool) -> None:
        if widen:
            self._widen(store, k)
        if self._now.is_wide(store, k):
            with self._pool.guard([store.totals[k]], self._access(store.totals[k])):
                accumulate(store.total(k)[start:stop], piece, workers=self._workers)
        else:
            with self._pool.guard([store.gradients[k]], self._access(store.gradients[k])):
                store.gradient(k)[start:stop].copy_(piece)
        self._unmeasured.setdefault(store, set()).add(k)

    def open_first(self, store: RunStore, k: int, wide: bool) -> Guard | None:
        """Open an untouched gradient chunk, to be filled whole by a copy; ``None`` if it has gradients.

        Args:
            wide: what is copied is in fp32.
        """
        if self._now.has(store, k):
            return None
        if wide:
            self._widen(store, k)
        chunk = self._now.chunk(store, k)
        return self._pool.guard([chunk], self._access(chunk))

    def filled(self, store: RunStore, k: int, slots: Iterable[Slot]) -> None:
        """The chunk opened by `open_first` now holds the gradients of ``slots``."""
        self._now.present.update(slot.index for slot in slots)
        self._unmeasured.setdefault(store, set()).add(k)

    def add_whole(self, store: RunStore, k: int, values: torch.Tensor, slots: Iterable[Slot]) -> None:
        """Add a whole chunk of gradients (zero where a parameter has none)."""
        self._widen(store, k)
        with self._pool.guard([store.totals[k]], self._access(store.totals[k])):
            accumulate(store.total(k), values, workers=self._workers)
        self.filled(store, k, slots)

    def add_range(self, store: RunStore, start: int, values: torch.Tensor, slots: Iterable[Slot]) -> None:
        """Add gradients to the elements from ``start`` on (zero where a parameter has none).

        Args:
            values: fp32, shape [n]; or of each rank, shape [ranks, n], fp32 or bf16: then their mean.
        """
        done, add = 0, accumulate if values.dim() == 1 else add_mean
        for k, low, high in store.run.overlapping(start, start + values.shape[-1]):
            self._widen(store, k)
            with self._pool.guard([store.totals[k]], self._access(store.totals[k])):
                piece = values[..., done : done + high - low]
                add(store.total(k)[low:high], piece, workers=self._workers)
            self._unmeasured.setdefault(store, set()).add(k)
            done += high - low
        self._now.present.update(slot.index for slot in slots)

    # -- handed on --------------------------------------------------------------------------------

    def is_wide(self, store: RunStore) -> bool:
        """Whether any of a run's gradients is a sum in fp32."""
        return any(self._now.is_wide(store, k) for k in range(store.run.chunks))

    def read_range(self, store: RunStore, start: int, out: torch.Tensor) -> None:
        """Copy the gradients of the elements from ``start`` on to ``out``, shape [n]; zeros where there are none."""
        for k, low, high in store.run.overlapping(start, start + out.numel()):
            at = store.run.extent(k)[0] + low - start
            if self._now.has(store, k):
                with self._pool.guard([self._now.chunk(store, k)], Access.READ):
                    out[at : at + high - low].copy_(self._now.values(store, k)[low:high])
            else:
                out[at : at + high - low].zero_()

    def forget(self, store: RunStore) -> None:
        """Drop the gradients of one run."""
        for k in range(store.run.chunks):
            chunks = {store.gradients[k], store.totals[k]}
            self._pool.discard(chunks & self._now.begun)
            self._now.begun -= chunks
            self._now.wide -= chunks
        self._now.present.difference_update(slot.index for slot in store.run.slots)
        self._unmeasured.pop(store, None)

    @property
    def collected(self) -> set[int]:
        """Numbers of the parameters that received a gradient since the last `take` or `clear`."""
        return set(self._now.present)

    def _access(self, chunk: Chunk) -> Access:
        """Nothing of a chunk's last step is read back."""
        if chunk in self._now.begun:
            return Access.WRITE
        self._now.begun.add(chunk)
        return Access.FRESH

    def _widen(self, store: RunStore, k: int) -> None:
        if self._now.is_wide(store, k):
            return
        narrow, total = store.gradients[k], store.totals[k]
        if narrow not in self._now.begun:
            self._now.wide.add(total)
            return
        with (
            self._pool.guard([narrow], Access.READ),
            self._pool.guard([total], self._access(total)),
        ):
            store.total(k).copy_(store.gradient(k))
        self._now.wide.add(total)
        self._pool.discard([narrow])

    # -- complete ---------------------------------------------------------------------------------

    def measure(self, store: RunStore) -> None:
        """Take the sums of squares of the chunks that changed; called when a unit's backward is over."""
        for k in sorted(self._unmeasured.pop(store, ())):
            with self._pool.guard([self._now.chunk(store, k)], Access.READ):
                self._sums[store, k] = self._squares(store, k, PLAIN)

    def _squares(self, store: RunStore, k: int, transform: GradTransform) -> torch.Tensor:
        values = self._now.values(store, k)
        found = []
        for start, stop in store.run.stretches(k):
            sums = torch.zeros(-(-(stop - start) // BLOCK), dtype=torch.float64)
            sum_of_squares(values[start:stop], sums, transform=transform, workers=self._workers)
            found.append(sums)
        return torch.cat(found)

    @allocating("the norm of the gradients")
    def sum_of_squares(self, transform: GradTransform = PLAIN) -> float:
        """The exact sum of the squares of all gradients; inf or NaN if one of them is.

        Args:
            transform: taken into account if it clamps, which needs another pass.
        """
        for store in tuple(self._unmeasured):
            self.measure(store)
        if math.isinf(transform.clamp):
            sums = [value for (_, _), block in self._ordered() for value in block.tolist()]
        else:
            sums = []
            for (store, k), _ in self._ordered():
                with self._pool.guard([self._now.chunk(store, k)], Access.READ):
                    sums += self._squares(store, k, transform).tolist()
        sums = self._everyones(sums)
        if not all(map(math.isfinite, sums)):
            return math.nan if any(map(math.isnan, sums)) else math.inf
        return math.fsum(sums)

    def first_nonfinite(self) -> str | None:
        """The unit whose gradient was the first, in the order of backward, to be inf or NaN."""
        for (store, _), block in self._sums.items():
            if not block.isfinite().all():
                return store.name or "the model itself"
        return None

    def _ordered(self) -> list[tuple[tuple[RunStore, int], torch.Tensor]]:
        rank = {store: position for position, store in enumerate(self._stores)}
        return sorted(self._sums.items(), key=lambda item: (rank[item[0][0]], item[0][1]))

    # -- used -------------------------------------------------------------------------------------

    def present(self, slot: Slot) -> bool:
        """Whether the parameter received a gradient since the last `take` or `clear`."""
        return slot.index in self._now.present

    def clear(self) -> None:
        """Forget all gradients that were not taken."""
        self._now.clear()
        self._unmeasured.clear()
        self._sums.clear()
