"""Ways of sharding on a cluster: what each rank keeps a slice of, and where its slices lie."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.errors import UsageError
from outcore.planning.cluster import Cluster, Group


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        parameters: each rank keeps a slice of them, and they are gathered for each use.
        gradients: likewise; they are reduced in each pass of a step. Otherwise they are in the last alone.
        states: each rank keeps a slice of masters and moments: gradients are reduced to slices, and parameters that
            every rank has as a whole are gathered after the update. Otherwise gradients are summed on all ranks.
        in_node: slices are those of a node's ranks, and every node has all of them. Otherwise of the cluster's.
        on_host: slices lie on the host and its disks, where updates run. Otherwise on the devices.
    """

    name: str
    parameters: bool = False
    gradients: bool = False
    states: bool = False
    in_node: bool = False
    on_host: bool = False

    def group(self, cluster: Cluster) -> Group:
        """The ranks that keep one copy together, if anything is in slices."""
        return Group(1 if self.in_node else cluster.nodes, cluster.gpus, cluster.in_network)

    def shares(self, cluster: Cluster) -> tuple[float, float, float]:
        """What of parameters, gradients and states each rank keeps."""
        part = 1 / self.group(cluster).size
        return (
            part if self.parameters else 1.0,
            part if self.gradients else 1.0,
            part if self.states else 1.0,
        )


WAYS = {
    way.name: way
    for way in (
        Way("data parallel"),
        Way("ZeRO-1", states=True),
        Way("ZeRO-2", gradients=True, states=True),
        Way("ZeRO-3", parameters=True, gradients=True, states=True),
        Way("hybrid", parameters=True, gradients=True, states=True, in_node=True),
        Way("outcore", parameters=True, gradients=True, states=True, on_host=True),
    )
}
"""All that are compared, by name."""


def way_of(name: str) -> Way:
    """The way that is meant.

    Raises:
        UsageError: there is no such way.
    """
    try:
        return WAYS[name]
    except KeyError:
        raise UsageError(f"unknown way {name!r}: choose from {', '.join(WAYS)}") from None
