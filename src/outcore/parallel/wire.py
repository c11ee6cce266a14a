"""Bytes between the ranks of one group. Nothing is computed here, so nothing is rounded.

[Note: Straight to its place]
Gloo's all-gather has a buffer of its own for what all ranks have, and copies it to where it was asked for. Of GPT-2
124M in bf16 that was 0.5 GB a step to be found, cleared, filled and copied. So large parts go from each rank to each
other by themselves, from where they are to where they belong: as many bytes, and no copy. Small ones, whose time is
that of the messages, stay with the collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from outcore.errors import PeerError
from outcore.memory.ledger import WIRE, Ledger

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

DIRECT = 64 << 10
"""Bytes of a part from which on it goes straight to its place."""

Lost = Callable[[str, str], PeerError]
"""From what was to be done and what was heard: the error that says who is missing."""


class Wire:
    """Collectives of one process group, on tensors of the host.

    Args:
        group: the process group.
        members: the global numbers of its ranks, in the group's order.
        lost: called when a connection broke.
        beside: collectives run beside the training thread, which does not wait for them here.

    Attributes:
        number: this rank's place in the group.
        size: how many ranks it has.
        ledger: told of the bytes that are received.
    """

    def __init__(self, group: Any, members: list[int], lost: Lost, beside: bool = False) -> None:
        self.group = group
        self.members = members
        self.size = len(members)
        self.number = members.index(dist.get_rank())
        self.ledger: Ledger | None = None
        self._lost = lost
        self._beside = beside

    def waiting(self) -> AbstractContextManager[None]:
        """Whatever is done inside counts as waiting for this wire."""
        return nullcontext() if self.ledger is None else self.ledger.waiting(WIRE)

    def gather(self, whole: torch.Tensor, what: str) -> None:
        """Bring everyone's part.

        Args:
            whole: contiguous, as many equal parts as there are ranks; this rank's is there already.
            what: for messages.
        """
        data = _bytes(whole)
        part = data.numel() // self.size
        own = data[self.number * part : (self.number + 1) * part]
        if part < DIRECT:
            self._run(what, part, lambda: _all_gather(data, own, group=self.group))
        else:
            self._run(what, part, lambda: self._direct(data.view(self.size, part)))

    def _direct(self, parts: torch.Tensor) -> None:
        """See [Note: Straight to its place]."""
        works: list[Any] = []
        for step in range(1, self.size):
            source, target = (self.number - step) % self.size, (self.number + step) % self.size
            works.append(dist.irecv(parts[source], self.members[source], group=self.group))
            works.append(dist.isend(parts[self.number], self.members[target], group=self.group))
        for work in works:
            work.wait()

    def begin_exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str) -> Callable[[], None]:
        """Give each rank its part, and get each rank's for this one; what is returned waits until that is done.

        Args:
            received, sent: contiguous, as many equal parts as there are ranks; nobody touches them until then.
            what: for messages.
        """
        into, out = _bytes(received), _bytes(sent)
        part = out.numel() // self.size
        if self.size == 1:
            into.copy_(out)
        begun: list[Any] = []

        def begin() -> None:
            begun.append(dist.all_to_all_single(into, out, group=self.group, async_op=True))

        self._attempt(what, begin)
        return lambda: self._run(what, part, lambda: begun[0].wait())

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Give everyone what the rank at place ``source`` has; contiguous."""
        data = _bytes(tensor)
        part = 0 if source == self.number else data.numel()
        found = self.members[source]
        self._run(what, part, lambda: dist.broadcast(data, found, group=self.group), factor=1)

    def hang_up(self) -> None:
        """Break the connections, so that whoever waits for this rank hears of it now."""
        group, self.group = self.group, None
        if group is not None:
            with suppress(Exception):
                dist.destroy_process_group(group)

    def _run(self, what: str, part: int, collective: Callable[[], Any], factor: int | None = None) -> None:
        if self.size == 1 or (part == 0 and factor is None):
            return
        self._attempt(what, collective)
        if self.ledger is not None:
            self.ledger.moved(WIRE, part * (self.size - 1 if factor is None else factor))

    def _attempt(self, what: str, collective: Callable[[], Any]) -> None:
        if self.size == 1:
            return
        heard = "" if self.group is not None else "this rank has hung up"
        if not heard:
            try:
                self._collect(collective)
            except RuntimeError as error:
                heard = str(error) or type(error).__name__
        if heard:  # the error is gone by now, and its frames with it: they would keep the connections open
            raise self._lost(what, heard.splitlines()[0][:160])

    def _collect(self, collective: Callable[[], Any]) -> None:
        waiting = nullcontext() if self._beside else self.waiting()
        with waiting, _disable_current_modes(), torch.no_grad():
            collective()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
