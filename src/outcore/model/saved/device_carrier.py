"""Saved tensors between an accelerator and page-locked chunks.

[Note: Streams of saved tensors]
Down: the copy-out stream waits for compute and copies; the tensor's memory on the device lives until the host has
seen the event after the copy. Up: memory is allocated on the compute stream; the copy-in stream waits for compute,
since that memory may be just freed there, and copies; compute waits for the event after the copy when backward
first sees it, or when it is dropped unseen.

What is alive when must not depend on how fast a link is, or the device budget would hold by luck. So tensors that
went down are let go at fixed places: when the next block's forward is over. And they come up at fixed places: with
the backward of the block after theirs in forward. What backward asks for while it is still here does not travel back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.chunks.chunk import Chunk
from outcore.chunks.guards import Guard
from outcore.chunks.pool import Access, Pool
from outcore.memory.device import Streams
from outcore.memory.ledger import Ledger
from outcore.memory.pinned import PinnedMemory
from outcore.memory.place import Place
from outcore.memory.refusal import allocating_on_device
from outcore.trace.meter import uncounted


@dataclass(eq=False)
class _Leaving:
    """A copy down: the bytes on the device, and the guard of the chunk they go to."""

    saved: torch.Tensor
    guard: Guard
    copied: torch.Event


@dataclass(eq=False)
class _Coming:
    """A copy up; compute has not seen it yet."""

    shown: torch.Tensor
    filled: torch.Event


class DeviceCarrier:
    """See [Note: Streams of saved tensors]. Implements `outcore.model.saved.carriers.Carrier`."""

    def __init__(
        self, device: torch.device, pool: Pool, pinned: PinnedMemory, streams: Streams, ledger: Ledger
    ) -> None:
        self._device = device
        self._pool = pool
        self._pinned = pinned
        self._streams = streams
        self._ledger = ledger
        self._before: dict[Chunk, _Leaving] = {}
        self._leaving: dict[Chunk, _Leaving] = {}
        self._coming: dict[Chunk, _Coming] = {}
        self._reading: list[tuple[torch.Event, Guard]] = []

    def place(self, nbytes: int) -> Place:
        return self._pinned.region(nbytes)

    # -- down -------------------------------------------------------------------------------------

    def store(self, chunk: Chunk, saved: torch.Tensor) -> None:
        guard, stream = self._pool.guard([chunk], Access.FRESH), self._streams.copy_out
        try:
            self._await_computed()
            with self._ledger.crossing("device out", chunk.name, stream, saved.numel()), stream:
                chunk.region.tensor[: saved.numel()].copy_(saved, non_blocking=True)
            self._leaving[chunk] = _Leaving(saved, guard, self._streams.record(stream))
        except BaseException:
            stream.synchronize()
            guard.close()
            raise

    def turn(self) -> None:
        for chunk in list(self._before):
            self._arrive(self._before.pop(chunk))
        self._before, self._leaving = self._leaving, {}

    def _arrive(self, leaving: _Leaving) -> None:
        self._await_copied(leaving)
        leaving.guard.close()

    # -- up ---------------------------------------------------------------------------------------

    def lift(self, chunks: Sequence[tuple[Chunk, int]]) -> None:
        self._settle()
        for chunk, nbytes in chunks:
            if chunk.ready and not self._is_here(chunk):
                self._coming[chunk] = self._bring(chunk, nbytes)

    def show(self, chunk: Chunk, nbytes: int) -> tuple[torch.Tensor, Guard | None]:
        leaving = self._before.get(chunk) or self._leaving.get(chunk)
        if leaving is not None:
            return leaving.saved, None
        coming = self._coming.pop(chunk, None) or self._bring(chunk, nbytes)
        self._await_filled(coming)
        return coming.shown, None

    def _is_here(self, chunk: Chunk) -> bool:
        return chunk in self._before or chunk in self._leaving or chunk in self._coming

    def _bring(self, chunk: Chunk, nbytes: int) -> _Coming:
        guard, stream = self._pool.guard([chunk], Access.READ), self._streams.copy_in
        try:
            with allocating_on_device(chunk.name, nbytes):
                shown = torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # a meter counts it
            self._await_free()
            with uncounted(), self._ledger.crossing("device in", chunk.name, stream, nbytes), stream:
                shown.copy_(chunk.region.tensor[:nbytes], non_blocking=True)
            filled = self._streams.record(stream)
        except BaseException:
            stream.synchronize()
            guard.close()
            raise
        self._reading.append((filled, guard))
        return _Coming(shown, filled)

    def _settle(self) -> None:
        """Let chunks go that have been copied up."""
        while self._reading and self._reading[0][0].query():
            self._reading.pop(0)[1].close()

    # -- the end ----------------------------------------------------------------------------------

    def forget(self, chunk: Chunk) -> None:
        for leaving in (self._before.pop(chunk, None), self._leaving.pop(chunk, None)):
            if leaving is not None:
                self._arrive(leaving)
        coming = self._coming.pop(chunk, None)
        if coming is not None:
            self._await_filled(coming)
        self._settle()

    def shut(self) -> None:
        self.turn()
        self.turn()
        for coming in self._coming.values():
            self._await_filled(coming)
        self._coming.clear()
        while self._reading:
            event, guard = self._reading.pop(0)
            event.synchronize()
            guard.close()

    # -- the waits, one by one --------------------------------------------------------------------

    def _await_computed(self) -> None:
        """Copy down after the kernels that make what is saved."""
        self._streams.copy_out.wait_event(self._streams.record(self._streams.compute))

    def _await_copied(self, leaving: _Leaving) -> None:
        """Let the memory on the device go, and the host have the chunk, after the copy down."""
        with self._ledger.waiting("device out"):
            leaving.copied.synchronize()

    def _await_free(self) -> None:
        """Copy up after the kernels that used the memory before."""
        self._streams.copy_in.wait_event(self._streams.record(self._streams.compute))

    def _await_filled(self, coming: _Coming) -> None:
        """Compute after the copy up."""
        compute = self._streams.compute
        with self._ledger.doing("device waiting", "device in", compute):
            compute.wait_event(coming.filled)
