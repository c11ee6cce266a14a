"""Directories for the disk tier: which ones can be trusted, and how much is free there."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from outcore.errors import UsageError


@dataclass(frozen=True)
class Place:
    """A directory that can be used; ``device`` tells file systems apart."""

    path: str
    device: int


def check_place(given: str | os.PathLike[str]) -> Place:
    """The absolute path of a directory in which the run may make its file. ``~`` is the home directory.

    Symbolic links are refused because who owns the link could lead the run elsewhere between this check and
    the use, and so are directories of other users (other than the superuser, who can read everything anyway).

    Raises:
        UsageError: it is not a directory that this process owns or the superuser lends, or not writable.
    """
    path = os.path.abspath(os.path.expanduser(os.fspath(given)))
    try:
        found = os.lstat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"the disk directory {path} can't be used: {reason}") from None
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(
            f"the disk directory {path} is a symbolic link: name {os.path.realpath(path)} instead"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the disk directory {path} is not a directory: name one")
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"the disk directory {path} belongs to another user (uid {found.st_uid}): name your own"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"the disk directory {path} is not writable: choose another or change its mode")
    return Place(path, found.st_dev)


def available_disk(path: str | os.PathLike[str]) -> int:
    """Bytes that an ordinary user can still write where ``path`` is.

    Raises:
        UsageError: there is no such path.
    """
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise UsageError(f"no free space to be found at {os.fspath(path)}: {error.strerror}") from None
    return found.f_bavail * found.f_frsize
