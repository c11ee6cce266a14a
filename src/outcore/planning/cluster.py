"""Many accelerators: nodes, the links between them, and what a collective costs.

[Note: Collectives]
W ranks, N nodes of M. A collective of n bytes moves, through each rank's links (Thakur et al. 2005, "Optimization of
collective communication operations in MPICH"; hierarchical as in NCCL: across the nodes among ranks of one number,
then within each node):

====================  =================================  ================================
per rank and way      within the node                    network
====================  =================================  ================================
all-gather            (M - 1) / M of n                   (N - 1) / N of n / M
reduce-scatter        the same                           the same
all-reduce            twice that                         twice that
====================  =================================  ================================

out and in alike. Where the switches add up and copy (in-network reduction: Graham et al. 2016, "SHARP"), an all-gather
sends its own part once and receives as before, a reduce-scatter the reverse, and an all-reduce sends and receives n / M
once on the network. So the two go side by side, each in its direction, where they would take turns.

The two levels are pipelined: a collective takes as long as its slower level. Each adds a latency, logarithmic in the
number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from outcore.errors import UsageError
from outcore.planning.machine import Machine

LATENCY_NODE = 3e-6
LATENCY_NETWORK = 10e-6
"""Seconds of a hop within a node and across the network, software included: assumed, NCCL's small messages."""

MOST = 4096
"""Ranks up to which the model is meant; beyond, networks have stages that it does not know."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind.

    Attributes:
        machine: one node, with one of its accelerators; all of them share its host memory, disks and CPU.
        nodes: how many.
        gpus: accelerators of a node.
        in_network: whether switches reduce and copy, in a node and between them.

    Raises:
        UsageError: a number that can't be, or a machine that doesn't say how its accelerators are linked.
    """

    machine: Machine
    nodes: int = 1
    gpus: int = 1
    in_network: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 1 or self.ranks > MOST:
            raise UsageError(
                f"nodes and GPUs per node must be at least 1 and {MOST:,} GPUs at most, and are {self.nodes} and "
                f"{self.gpus}"
            )
        if self.ranks > 1 and self.machine.device is None:
            raise UsageError(f"{self.machine.name} has no accelerator: there is nothing to be linked")
        if (self.gpus > 1 and not self.machine.in_node) or (self.nodes > 1 and not self.machine.network):
            raise UsageError(
                f"{self.machine.name} does not say how its accelerators are linked: state in_node and network, bytes "
                "per second and direction of each, in its file"
            )

    @property
    def ranks(self) -> int:
        """How many accelerators there are."""
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Move:
    """What a collective moves through each rank's links, in bytes, and its latency in seconds."""

    node_out: float = 0.0
    node_in: float = 0.0
    network_out: float = 0.0
    network_in: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: so many nodes, so many of each; what each rank has is ``1 / size`` of the whole."""

    nodes: int
    gpus: int
    in_network: bool

    @property
    def size(self) -> int:
        return self.nodes * self.gpus

    @property
    def latency(self) -> float:
        """Of one direction."""
        hops = 1 if self.in_network else self.gpus - 1
        within = LATENCY_NODE * hops if self.gpus > 1 else 0.0
        return within + (LATENCY_NETWORK * ceil(log2(self.nodes)) if self.nodes > 1 else 0.0)

    def all_gather(self, nbytes: float) -> Move:
        """Each rank has its part of ``nbytes``, and then all of them."""
        within = nbytes * (self.gpus - 1) / self.gpus
        across = nbytes / self.gpus * (self.nodes - 1) / self.nodes
        if not self.in_network:
            return Move(within, within, across, across, self.latency)
        own = nbytes / self.size
        return Move(
            nbytes / self.gpus if self.gpus > 1 else 0.0,
            within,
            own if self.nodes > 1 else 0.0,
            across,
            self.latency,
        )

    def reduce_scatter(self, nbytes: float) -> Move:
        """Each rank has ``nbytes`` to be added up, and then its part of the sum."""
        m = self.all_gather(nbytes)
        return Move(m.node_in, m.node_out, m.network_in, m.network_out, m.latency)

    def all_reduce(self, nbytes: float) -> Move:
        """Each rank has ``nbytes`` to be added up, and then the sum."""
        m = self.all_gather(nbytes)
        if not self.in_network:
            return Move(2 * m.node_out, 2 * m.node_in, 2 * m.network_out, 2 * m.network_in, 2 * m.latency)
        within = nbytes if self.gpus > 1 else 0.0
        across = nbytes / self.gpus if self.nodes > 1 else 0.0
        return Move(within, within, across, across, m.latency)


class Fabric:
    """The links of one rank on a virtual clock; each direction of each level serves one thing after the other.

    Attributes:
        moved: bytes sent and received within the node and on the network.
    """

    def __init__(self, machine: Machine) -> None:
        self._rates = (machine.in_node, machine.in_node, machine.network, machine.network)
        self._free = [0.0] * 4
        self.moved = [0.0] * 4

    def start(self, move: Move, now: float) -> float:
        """When a collective that all ranks ask for now is over."""
        amounts = (move.node_out, move.node_in, move.network_out, move.network_in)
        end = 0.0
        for k, amount in enumerate(amounts):
            if amount:
                self._free[k] = max(now, self._free[k]) + amount / self._rates[k]
                self.moved[k] += amount
                end = max(end, self._free[k])
        return end + move.latency if end else now
