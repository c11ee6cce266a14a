"""One read or write of an extent, and the thread that reports those that are over."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue

from outcore.memory import watchdog
from outcore.memory.extents import Extent
from outcore.memory.observer import Mark


class Transfer:
    """A read or write of one extent, cut into pieces. Changed only under the lock of its lane.

    Args:
        view: the memory, as long as the extent.
        request: bytes of a piece; the last one may be shorter.

    Attributes:
        following: the next piece to start.
        running: pieces under way.
        digests: one per piece; of what is written, or of what must be read.
        began: when its first piece started, if somebody looks on.
        error: the first that any piece met.
        since: when it was asked for, by the watchdog's clock.
    """

    def __init__(self, extent: Extent, view: memoryview, writing: bool, request: int) -> None:
        self.extent = extent
        self.view = view
        self.writing = writing
        self.request = request
        self.pieces = -(-extent.nbytes // request)
        self.following = 0
        self.running = 0
        self.digests = [0] * self.pieces
        self.began: Mark | None = None
        self.error: BaseException | None = None
        self.since = watchdog.CLOCK.now()
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it can't be cancelled

    @property
    def over(self) -> bool:
        return self.following == self.pieces and self.running == 0

    def size(self, piece: int) -> int:
        """Bytes of a piece."""
        return min(self.request, self.extent.nbytes - piece * self.request)

    def abandon(self) -> int:
        """Start no more pieces; the bytes of those that are left out."""
        left = max(0, self.extent.nbytes - self.following * self.request)
        self.following = self.pieces
        return left


class Completer:
    """Completes futures, and so runs their callbacks, on a thread of its own."""

    def __init__(self) -> None:
        self._over: SimpleQueue[Transfer | None] = SimpleQueue()
        self.thread = threading.Thread(
            target=_complete, args=(self._over,), name="outcore-disk-done", daemon=True
        )
        self.thread.start()

    def put(self, transfer: Transfer) -> None:
        """Report a transfer that is over. Never waits."""
        self._over.put(transfer)

    def close(self) -> None:
        """Let the thread go once everything is reported. Does not wait."""
        self._over.put(None)


def _complete(over: SimpleQueue[Transfer | None]) -> None:
    while (transfer := over.get()) is not None:
        future, error = transfer.future, transfer.error
        del transfer  # and with it the buffer, before anyone is told
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        del future, error  # an idle thread keeps nothing alive
