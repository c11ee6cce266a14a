"""Memory that ranks of one machine have in common."""

from __future__ import annotations

from contextlib import suppress

from outcore.errors import TierError
from outcore.memory.host import PAGE
from outcore.memory.shared import SharedMemory
from outcore.parallel.ranks import World

_WHAT = "the search for memory that ranks share"
_YES = b"\1"


def can_share(world: World, willing: bool) -> bool:
    """Whether all ranks can share memory with those among which their states are cut: tried with a page.

    All ranks call this together, and all get the same answer.

    Args:
        willing: whether this rank has a use for it.
    """
    return _share(world, PAGE, willing and world.together_here) is not None


def share(world: World, nbytes: int) -> SharedMemory:
    """Memory that a rank shares with those among which its states are cut, after `can_share` said so.

    All ranks call this together, with the same number.

    Raises:
        TierError: the system refused, here or on another rank.
    """
    memory = _share(world, nbytes, True)
    if memory is None:
        raise TierError(
            f"the system refused {nbytes:,} bytes of addresses, or a file descriptor, for memory that ranks share: "
            "raise the limits of their processes (ulimit -v, ulimit -n)"
        )
    return memory


def _share(world: World, nbytes: int, willing: bool) -> SharedMemory | None:
    memory: SharedMemory | None = None
    if willing and world.slices.number == 0:
        with suppress(OSError):
            memory = SharedMemory.create(nbytes)
    own = b"" if not willing else _YES if memory is None else memory.address
    said = world.words(own, _WHAT)
    found = [said[number] for number in world.row]
    if all(found) and memory is None and len(found[0]) > len(_YES):
        with suppress(OSError):
            memory = SharedMemory.open(found[0])
    there = world.words(b"" if memory is None else _YES, _WHAT)
    return memory if all(there) else None
