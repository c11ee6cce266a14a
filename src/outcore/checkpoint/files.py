"""The seam between checkpoints and the file system: every call that can fail, in one small class.

Each method does one attempt and raises the `OSError` of the system. `writing` and `reading` turn that into
outcore's errors; `write_all` and `read_all` go on after short transfers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outcore.errors import CheckpointError, DiskFullError, DiskReadError, DiskWriteError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Files:
    """The file system."""

    def make_directory(self, path: Path) -> None:
        """Make one directory; it must not exist."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A descriptor of a new file, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def open(self, path: Path) -> int:
        """A descriptor of a regular file, for reading. Links and pipes are refused."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def open_to_write(self, path: Path) -> int:
        """A descriptor of a file that another process made, for writing."""
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def write(self, fd: int, view: memoryview, offset: int) -> int:
        """Write at an offset; the bytes written, which may be fewer."""
        return os.pwrite(fd, view, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """Read at an offset; the bytes read, 0 at the end."""
        return os.preadv(fd, [view], offset)

    def sync(self, fd: int) -> None:
        """Make a file's bytes durable."""
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Give a directory another name, atomically. A ``new`` that holds files is not replaced."""
        os.rename(old, new)

    def names(self, path: Path) -> list[str]:
        """What a directory holds."""
        return os.listdir(path)

    def remove(self, path: Path) -> None:
        """Remove a directory and all it holds."""
        shutil.rmtree(path)

    def lock(self, path: Path) -> int | None:
        """Lock a directory for as long as the descriptor is open in a living process.

        Returns:
            A descriptor, or ``None`` where someone else holds the lock or the directory is gone.

        Raises:
            OSError: also where the file system has no locks.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here, named = os.fstat(fd), os.stat(path, follow_symlinks=False)
            if (here.st_dev, here.st_ino) == (named.st_dev, named.st_ino):
                return fd
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


SYSTEM = Files()
"""What checkpoints are written to and read from; looked up at each save and load."""


def has_no_locks(error: OSError) -> bool:
    """Whether an error of `Files.lock` means that this file system knows no locks."""
    return error.errno in _NO_LOCKS


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors into `DiskFullError` and `DiskWriteError`, which name ``path``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, (DiskFullError, DiskWriteError, DiskReadError, CheckpointError)):
            raise
        kind = DiskFullError if error.errno in _FULL else DiskWriteError
        raise kind(
            error.errno,
            f"the checkpoint can't be written ({error.strerror}); earlier ones are intact",
            str(path),
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the system's errors into `DiskReadError`, or `CheckpointError` for what is missing."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete") from error
    except OSError as error:
        if isinstance(error, (DiskReadError, CheckpointError)):
            raise
        raise DiskReadError(
            error.errno, f"the checkpoint can't be read ({error.strerror})", str(path)
        ) from error


def write_all(files: Files, fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Write all of ``view`` at ``offset``.

    Raises:
        DiskFullError, DiskWriteError: the system refused, or wrote nothing.
    """
    done = 0
    with writing(path):
        while done < len(view):
            moved = files.write(fd, view[done:], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, f"wrote {done:,} of {len(view):,} bytes")
            done += moved


def read_all(files: Files, fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill ``view`` from ``offset``.

    Raises:
        DiskReadError: the system refused.
        CheckpointError: the file ends before.
    """
    done = 0
    with reading(path):
        while done < len(view):
            moved = files.read(fd, view[done:], offset + done)
            if moved <= 0:
                raise CheckpointError(f"{path} ends at {offset + done:,} bytes: it is truncated")
            done += moved
