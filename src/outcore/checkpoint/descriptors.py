"""The files of a checkpoint, however many there are: few of them are open at a time.

[Note: Few descriptors]
A file takes no further tensor once it has 256 MiB, so from some 10 billion parameters on a checkpoint has more files
than a process may usually have open (1,024). So a file is opened when bytes are moved, and stays open until `MOST`
others were used. Tensors are streamed in the order of files: hardly one is opened again for its bytes.

A file that is closed before it is durable loses nothing by that: its bytes are made durable through any descriptor, and
the next one hears of an error that no other has heard of.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outcore.checkpoint.files import Files, read_all, reading, write_all, writing

MOST = 32
"""Files that stay open; each thread that moves bytes may have one more."""


class Descriptors:
    """Opens files when they are used, and closes those that were not used for longest. Any thread may use any file.

    Args:
        opener: opens one.
        closer: closes one; what it raises is raised by whoever needs the room.
    """

    def __init__(self, opener: Callable[[Path], int], closer: Callable[[int, Path], None]) -> None:
        self._opener = opener
        self._closer = closer
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._users: Counter[Path] = Counter()

    @contextmanager
    def use(self, path: Path, opener: Callable[[Path], int] | None = None) -> Iterator[int]:
        """A descriptor of a file, which stays open meanwhile.

        Args:
            opener: opens this one, if it is not open.
        """
        while (
            old := self._surplus(path)
        ) is not None:  # one may take seconds to close: the others don't wait
            self._closer(*old)
        with self._lock:
            if path not in self._open:
                self._open[path] = (opener or self._opener)(path)
            self._open.move_to_end(path)
            self._users[path] += 1
            fd = self._open[path]
        try:
            yield fd
        finally:
            with self._lock:
                self._users[path] -= 1
                if not self._users[path]:
                    del self._users[path]

    def _surplus(self, coming: Path) -> tuple[int, Path] | None:
        """One that is to be closed before another comes, if there is one; it is no longer here then."""
        with self._lock:
            if coming in self._open or len(self._open) < MOST:
                return None
            idle = next((path for path in self._open if path not in self._users), None)
            return None if idle is None else (self._open.pop(idle), idle)

    def drop(self, path: Path) -> None:
        """Close a file that nobody uses, if it is open."""
        with self._lock:
            fd = self._open.pop(path, None)
        if fd is not None:
            self._closer(fd, path)

    def abandon(self, close: Callable[[int], None]) -> None:
        """Close all that are open, whatever that raises."""
        while self._open:
            with contextlib.suppress(OSError):
                close(self._open.popitem()[1])


class Readable:
    """Files to read from."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptors = Descriptors(self._opened, self._closed)

    def _opened(self, path: Path) -> int:
        with reading(path):
            return self._files.open(path)

    def _closed(self, fd: int, path: Path) -> None:
        with contextlib.suppress(OSError):  # nothing was written
            self._files.close(fd)

    def size(self, path: Path) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError: it is missing.
            DiskReadError: the system refused.
        """
        with self._descriptors.use(path) as fd, reading(path):
            return self._files.size(fd)

    def read(self, path: Path, view: memoryview, offset: int) -> None:
        """Fill ``view`` from an offset of a file.

        Raises:
            CheckpointError: it is missing, or ends before.
            DiskReadError: the system refused.
        """
        with self._descriptors.use(path) as fd:
            read_all(self._files, fd, view, offset, path)

    def close(self) -> None:
        self._descriptors.abandon(self._files.close)


class Writable:
    """Files to write to.

    All methods raise `DiskFullError` and `DiskWriteError` where the system refuses.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._descriptors = Descriptors(self._opened, self._closed)

    def _opened(self, path: Path) -> int:
        with writing(path):
            return self._files.open_to_write(path)

    def _created(self, path: Path) -> int:
        with writing(path):
            return self._files.create(path)

    def _closed(self, fd: int, path: Path) -> None:
        with writing(path):  # some file systems tell only here that bytes were not written
            self._files.close(fd)

    def create(self, path: Path, header: memoryview) -> None:
        """Make a file that begins with these bytes; there must be none."""
        with self._descriptors.use(path, self._created) as fd:
            write_all(self._files, fd, header, 0, path)

    def write(self, path: Path, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at an offset of a file that exists."""
        with self._descriptors.use(path) as fd:
            write_all(self._files, fd, view, offset, path)

    def finish(self, path: Path) -> None:
        """Make a file durable and close it."""
        with self._descriptors.use(path) as fd, writing(path):
            self._files.sync(fd)
        self._descriptors.drop(path)

    def close(self) -> None:
        """Close what is open still; what was not finished need not last."""
        self._descriptors.abandon(self._files.close)
