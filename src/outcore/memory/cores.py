"""Which processors this process may use, and how what it does shares them.

[Note: Shares]
Ranks of one node share its processors: each takes as many as the least of three: what its affinity leaves, what its
control groups' quota allows, and an equal part of the node (``LOCAL_WORLD_SIZE``). A rank that a launcher has bound to
a part of the node already (``torchrun --numa-binding``, ``numactl``, ``taskset``) keeps all of that part. Where there
are as many ranks as NUMA nodes or more, a rank's threads stay on one of them, and so do the pages they touch first:
what is read from disk, and all that updates write.

[Note: Who computes when]
Torch's operators have their own threads, as many as ``torch.set_num_threads`` or ``OMP_NUM_THREADS`` say: that is the
user's business, and their bits may depend on it. Updates run beside them, on threads of ours. Where torch leaves some
of the share alone (torchrun sets ``OMP_NUM_THREADS=1`` for several processes), updates take what is left; where it uses
all, they take as many, and the system divides the time. The bits of updates don't depend on any of this. Threads that
move bytes wait for the disk nearly all of their time and are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outcore.memory import cgroup


@dataclass(frozen=True)
class Cores:
    """A process's share of a node.

    Attributes:
        count: processors it may keep busy.
        among: the numbers of those its threads run on.
        node: the NUMA node they all lie on, where there are several and it keeps to one.
        ranks: processes that share the node.
    """

    count: int
    among: frozenset[int]
    node: int | None
    ranks: int

    def for_updates(self, computing: int) -> int:
        """Threads of an update, where torch computes with so many; see [Note: Who computes when]."""
        left = self.count - computing
        return left if left > 0 else self.count

    def describe(self, computing: int) -> str:
        """In words."""
        shared = f", of {self.ranks} ranks here" if self.ranks > 1 else ""
        where = f", on NUMA node {self.node}" if self.node is not None else ""
        hint = (
            ""
            if computing >= self.count or self.ranks == 1
            else f" (OMP_NUM_THREADS={self.count} gives it all)"
        )
        return (
            f"{computing} to compute{hint}, {self.for_updates(computing)} to update; "
            f"{self.count} processors{shared}{where}"
        )


def share(
    environment: Mapping[str, str],
    allowed: frozenset[int],
    root: Path = Path("/"),
    launcher: frozenset[int] | None = None,
) -> Cores:
    """What a process may use.

    Args:
        environment: with torchrun's ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, if it is one of several.
        allowed: the processors of its affinity.
        root: where ``/proc`` and ``/sys`` are found; for tests.
        launcher: the processors of whoever started it; by default all. In a container ``/sys`` shows the machine's, and
            an affinity as wide as the launcher's is the container's, which its ranks share.
    """
    ranks, rank = _number(environment, "LOCAL_WORLD_SIZE", 1), _number(environment, "LOCAL_RANK", 0)
    nodes = {number: cpus & allowed for number, cpus in _nodes(root).items() if cpus & allowed}
    online = launcher or _listed(root / "sys/devices/system/cpu/online") or allowed
    node = None
    if ranks > 1 and len(allowed) * ranks <= len(online):  # bound by the launcher
        count = len(allowed)
        node = next(iter(nodes)) if len(nodes) == 1 and len(_nodes(root)) > 1 else None
    elif 1 < len(nodes) <= ranks:
        numbers = sorted(nodes)
        place = rank * len(numbers) // ranks
        node, allowed = numbers[place], nodes[numbers[place]]
        beside = sum(other * len(numbers) // ranks == place for other in range(ranks))
        count = len(allowed) // beside
    else:
        count = len(allowed) // ranks
    quota = cgroup.processors(root)
    if quota is not None:
        count = min(count, int(quota / ranks))
    return Cores(max(1, count), allowed, node, ranks)


@functools.cache
def ours() -> Cores:
    """The share of this process, as it was when first asked for."""
    if hasattr(os, "sched_getaffinity"):
        allowed = frozenset(os.sched_getaffinity(0))
    else:
        allowed = frozenset(range(os.cpu_count() or 1))
    return share(os.environ, allowed, launcher=_affinity(os.getppid()))


def _affinity(process: int) -> frozenset[int] | None:
    """Where a process may run; ``None`` if that can't be known."""
    try:
        return frozenset(os.sched_getaffinity(process))
    except (AttributeError, OSError):
        return None


def keep_to_node() -> None:
    """Bind the calling thread to the NUMA node of this process, if it keeps to one."""
    found = ours()
    if found.node is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a processor that went offline, a container that forbids it
            os.sched_setaffinity(0, found.among)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() and int(text) >= default else default


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """The processors of each NUMA node that has some."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    found = {int(folder.name.removeprefix("node")): _listed(folder / "cpulist") for folder in folders}
    return {number: cpus for number, cpus in sorted(found.items()) if cpus}


def _listed(path: Path) -> frozenset[int]:
    """The numbers in a list such as ``0-3,8``; none if it can't be read."""
    try:
        parts = path.read_text().strip().split(",")
        bounds = [part.split("-") for part in parts if part]
        return frozenset(
            k for low, *high in bounds for k in range(int(low), int(high[0] if high else low) + 1)
        )
    except (OSError, ValueError):
        return frozenset()


# a child of fork may have another place in the world
os.register_at_fork(after_in_child=ours.cache_clear)
