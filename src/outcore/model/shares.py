"""A batch divided among ranks: each takes its rows, and the gradient is that of the whole batch."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from outcore.errors import UsageError
from outcore.memory.ledger import WIRE, Ledger
from outcore.model.rowless import Rowless, nothing
from outcore.model.trees import change_tensors, take_apart, tensors_of
from outcore.parallel.balance import BySpeed, Even
from outcore.parallel.ranks import Ranks

Split = Literal["even", "speed"]

Busy = Callable[[], float]
"""Seconds that this rank worked so far. Only differences count."""


class Part:
    """What one rank takes of a batch. A context manager: what is done inside is what a rank's speed is measured by.

    Attributes:
        batch: this rank's rows, in the form of the whole batch.
        rows: how many of the whole batch's rows they are.
        weight: what the mean loss of these rows counts: 1 where all ranks have the same number.

    A rank that has no rows of its own gets one that another has too, with weight 0: so all ranks take part in what
    they do together. Its loss counts as 0 also where it is not finite; see `outcore.model.rowless`.
    """

    def __init__(
        self,
        batch: Any,
        rows: int,
        weight: float,
        busy: Busy,
        done: Callable[[float], None],
        rowless: Rowless,
    ) -> None:
        self.batch = batch
        self.rows = rows
        self.weight = weight
        self._busy = busy
        self._done = done
        self._rowless = rowless
        self._began = 0.0

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward of, from the mean over this rank's rows.

        The gradients of what is returned, averaged over ranks, are those of the mean over the whole batch.
        """
        if self.rows == 0:
            return nothing(loss, self._rowless)
        return loss if self.weight == 1.0 else loss * self.weight

    def __enter__(self) -> Part:
        self._began = self._busy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._done(self._busy() - self._began)


class Shares:
    """Divides batches among ranks. All ranks make one and ask it for parts of the same batches, together.

    Made by `outcore.shares`.

    Args:
        ranks: who they are divided among.
        split: ``"even"``, or ``"speed"``: in proportion to what each rank does in a second, as it was measured.
        busy: this rank's clock.
        rowless: told of the backward passes of parts without rows.

    Raises:
        UsageError: an unknown split.
    """

    def __init__(self, ranks: Ranks, split: Split, busy: Busy, rowless: Rowless) -> None:
        if split not in get_args(Split):
            known = " or ".join(map(repr, get_args(Split)))
            raise UsageError(f"unknown split {split!r}: it is {known}")
        self._ranks = ranks
        self._policy = BySpeed(ranks.size) if split == "speed" else Even(ranks.size)
        self._busy = busy
        self._rowless = rowless
        self._last: tuple[tuple[int, ...], float] | None = None

    def part(self, batch: Any) -> Part:
        """This rank's part of a batch.

        Args:
            batch: the whole of it, the same on all ranks: tensors in tuples, lists and dicts, all of which have the
                rows along their first dimension.

        Raises:
            UsageError: tensors have different numbers of rows, or none; ranks have different batches.
            PeerError: a rank failed, or does something else.
        """
        what = "the division of a batch"
        with self._ranks.telling(what):
            rows = _rows_of(batch)
        last, self._last = self._last, None
        word = _WORD.pack(rows, last[1] if last else math.nan)
        said = [_WORD.unpack(bits) for bits in self._ranks.agree(what, word)]
        for rank, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise UsageError(
                    f"rank {rank} was given a batch of {theirs} rows and rank 0 one of {said[0][0]}: give all ranks "
                    "the same batch, of which each takes its part"
                )
        seconds = [busy for _, busy in said]
        if last and not any(map(math.isnan, seconds)):
            self._policy.note(last[0], seconds)
        division = self._policy.divide(rows)
        number = self._ranks.number
        own, first = division[number], sum(division[:number])
        start, stop = (first, first + own) if own else (0, 1)
        taken = change_tensors(batch, lambda tensor: tensor[start:stop])
        run = tuple(max(count, 1) for count in division)

        def done(seconds: float) -> None:
            self._last = (run, seconds)

        return Part(taken, own, own * self._ranks.size / rows, self._busy, done, self._rowless)


_WORD = struct.Struct("<Qd")
"""What ranks say: the rows of a batch, and seconds that the part before took; NaN if it was not finished."""


def _rows_of(batch: Any) -> int:
    """Rows of all tensors of a batch."""
    _, tensors = take_apart(batch)
    if {id(tensor) for tensor in tensors} != {id(tensor) for tensor in tensors_of(batch)} or not tensors:
        raise UsageError(
            "only batches of tensors in plain tuples, lists and dicts can be divided: give dict(batch), or the like"
        )
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(counts) > 1 or 0 in counts:
        raise UsageError(
            "a batch is divided by its rows: its tensors must have the same number of them along their first "
            f"dimension, and have {sorted(counts)}"
        )
    return counts.pop()


def busy_by(ledger: Ledger) -> Busy:
    """The time of day, less what was spent waiting for other ranks."""
    return lambda: time.perf_counter() - ledger.snapshot().waited.get(WIRE, 0.0)
