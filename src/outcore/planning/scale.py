"""A step on many accelerators, on paper: ZeRO's stages, hybrid sharding and outcore's tiers over nodes and switches.

[Note: One rank for all]
All ranks do the same on batches of one size, so the step of one is the step of each: its own computing, its own links,
and collectives that end for all at once (see `outcore.planning.cluster`). That is why 4,096 ranks
cost no more to simulate than 8. Stragglers, congestion between jobs and failures are not in it.

[Note: What each does]
Gradients are reduced unit by unit while backward goes on. Plain data parallelism and ZeRO-1 reduce in the last pass of
a step, sharded gradients (ZeRO-2 and -3) in each. ZeRO-1 and -2 gather parameters once after the update; ZeRO-3
gathers each unit in forward and again in backward, `AHEAD` units ahead. Hybrid does what ZeRO-3 does within a node, and
all-reduces its slice of the gradients between nodes in the last pass. (Rajbhandari et al. 2020, "ZeRO"; Zhao et al.
2023, "PyTorch FSDP".)

outcore keeps each rank's slice of all states on its share of the node's host and disks: a slice goes up its own link
and is gathered on the devices, a gradient is reduce-scattered there and its slice comes down, updates run on the host
under the next forward. Blocks run the rank's whole batch in slices, so that it gathers twice and reduces once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outcore.memory.limits import spare
from outcore.model.policies import Activations
from outcore.model.unit import Unit
from outcore.planning.cluster import Cluster, Fabric, Group
from outcore.planning.fake_step import Trace
from outcore.planning.flow import Link
from outcore.planning.settings import Settings, slice_rows
from outcore.planning.strategies import Row, Share, Sizes
from outcore.planning.subject import Subject
from outcore.planning.timing import seconds_of
from outcore.planning.ways import WAYS, Way, way_of

AHEAD = 2
"""Units that are gathered before they are used."""

STEPS = 3
"""Steps that are simulated; the last counts."""

CHUNK = 32 << 20
ROUNDING = 64
"""Bytes by which shares of a tier that is filled to the brim may pass it."""


@dataclass(frozen=True)
class Spread:
    """One way on a cluster.

    Attributes:
        name: of the way.
        ranks: how many accelerators.
        settings: of each rank.
        memory: per rank; host and disk are shared by the ranks of a node.
        seconds: of a step; 0 if it doesn't fit.
        compute: seconds of forward and backward in it.
        waited: seconds that computing stood still for links, updates and the end of the step.
        sent: bytes that each rank sent in a step, ``within`` its node and on the ``network``; so many it received.
        tokens: of a step, all ranks together.
    """

    name: str
    ranks: int
    settings: Settings
    memory: Row
    seconds: float
    compute: float
    waited: float
    sent: Mapping[str, float]
    tokens: int

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks; 0 if it doesn't fit."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Everything, as JSON has it."""
        return {
            "way": self.name,
            "ranks": self.ranks,
            "fits": self.fits,
            "micro_batch": self.settings.micro_batch,
            "accumulate": self.settings.accumulate,
            "activations": str(self.settings.activations),
            "microbatch": self.settings.activations.microbatch,
            "seconds": self.seconds,
            "compute_seconds": self.compute,
            "waited_seconds": self.waited,
            "sent_bytes": dict(self.sent),
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "bytes_per_rank": {tier: dict(kinds) for tier, kinds in self.memory.tiers.items()},
        }


def spread(
    subject: Subject, cluster: Cluster, accumulate: int = 1, ways: Iterable[str] = WAYS
) -> list[Spread]:
    """Each way at its fastest settings that fit; where none does, at those that need least.

    Args:
        subject: its batch is that of one rank.
        accumulate: batches of a step.
        ways: by name.

    Raises:
        UsageError: there is no such way.
        ModelError: the model can't be traced.
    """
    return [_best(subject, cluster, accumulate, way) for way in [way_of(name) for name in ways]]


def _best(subject: Subject, cluster: Cluster, accumulate: int, way: Way) -> Spread:
    found = [simulate(subject, cluster, way.name, s) for s in _settings(subject, accumulate, way.on_host)]
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    return min(found, key=lambda one: one.memory.total("device"))


def _settings(subject: Subject, accumulate: int, slices: bool) -> Iterator[Settings]:
    """Passes of the whole batch, halves of it and so on; blocks keep or recompute, or run in slices."""
    size, turns = subject.batch_size, accumulate
    if slices:
        whole = size * accumulate
        part = slice_rows(whole, subject.tokens)
        if part is not None:
            yield Settings(whole, 1, Activations("recompute", part), CHUNK)
    while True:
        for blocks in ("keep", "recompute"):
            yield Settings(size, turns, Activations(blocks), CHUNK)
        if size % 2:
            return
        size, turns = size // 2, turns * 2


def simulate(subject: Subject, cluster: Cluster, name: str, settings: Settings) -> Spread:
    """One way with fixed settings.

    Args:
        name: of the way.

    Raises:
        UsageError: there is no such way.
        ModelError: the model can't be traced.
    """
    way = way_of(name)
    units, _ = subject.layout(settings.chunk_bytes)
    trace = subject.trace(settings.micro_batch, settings.activations)
    sizes = Sizes.of(units, subject.facts.buffers)
    memory, on_disk = _memory(sizes, trace, cluster, way)
    tokens = trace.tokens * settings.accumulate * cluster.ranks
    if not memory.fits:
        return Spread(name, cluster.ranks, settings, memory, 0.0, 0.0, 0.0, {}, tokens)
    rank = _Rank(units, trace, cluster, way, on_disk)
    for number in range(STEPS):
        start, computed, moved = rank.now, rank.computed, list(rank.fabric.moved)
        for turn in range(settings.accumulate):
            rank.lap(last=turn + 1 == settings.accumulate)
        rank.step()
        if number + 1 == STEPS:
            seconds, compute = rank.now - start, rank.computed - computed
            sent = [after - before for after, before in zip(rank.fabric.moved, moved, strict=True)]
    # an update on the device is neither computing nor waiting
    waited = seconds - compute - rank.updating
    return Spread(
        name,
        cluster.ranks,
        settings,
        memory,
        seconds,
        compute,
        waited,
        {"within": max(sent[:2]), "network": max(sent[2:])},
        tokens,
    )


def _memory(sizes: Sizes, trace: Trace, cluster: Cluster, way: Way) -> tuple[Row, float]:
    """What each rank holds, and the share of its states that lies on disk."""
    machine, ranks, gpus = cluster.machine, cluster.ranks, cluster.gpus
    share = Share(sizes, trace, ranks)
    host = spare("host", machine.host) / gpus
    disk = spare("disk", machine.disk) / gpus if machine.disk else 0
    gathers = 1 + AHEAD if way.parameters else 0
    on_disk = 0.0
    if not way.on_host:
        row = share.row(way.name, device=way.shares(cluster), gathers=gathers)
    else:
        whole = (sizes.parameters + sizes.frozen + sizes.gradients + sizes.moments + share.masters) / ranks
        on_disk = max(0.0, 1 - host / max(1.0, whole))
        on_host = (1 - on_disk) / ranks
        row = share.row(
            way.name, host=(on_host,) * 3, disk=(on_disk / ranks,) * 3, gathers=gathers, half=share.masters
        )
    room = {"device": spare("device", machine.device or 0), "host": host, "disk": disk}
    fits = all(row.total(tier) <= room[tier] + ROUNDING for tier in room)
    return Row(row.name, row.tiers, fits), on_disk


class _Rank:
    """One rank through its steps."""

    def __init__(
        self, units: Sequence[Unit], trace: Trace, cluster: Cluster, way: Way, on_disk: float
    ) -> None:
        machine = cluster.machine
        self._trace, self._way, self._machine = trace, way, machine
        self._world = Group(cluster.nodes, cluster.gpus, cluster.in_network)
        self._group = way.group(cluster)
        self._nodes = Group(cluster.nodes, 1, cluster.in_network)
        self._parameters = [sum(s.run.nbytes for s in unit.stores) for unit in units]
        self._gradients = [sum(s.run.nbytes for s in unit.stores if s.run.trained) for unit in units]
        states = [sum(c.nbytes for s in unit.stores for c in s.states) for unit in units]
        # an update reads a gradient, and reads and writes states and parameters
        self._updates = [3 * g + 2 * s for g, s in zip(self._gradients, states, strict=True)]
        self._stored = [on_disk * s for s in states]
        self._seconds = [seconds_of(span.work, machine) for span in trace.spans]
        self._uses = [span.event[1] for span in trace.spans if span.event[0] in ("forward", "backward")]
        self._updated = [0.0] * len(units)
        self._ends = [0.0]
        self._up, self._down = Link(machine.link_in or 1e30), Link(machine.link_out or 1e30)
        self._gpus, self._disk = cluster.gpus, 0.0
        self.fabric = Fabric(machine)
        self.now = self.computed = self.updating = 0.0

    def lap(self, last: bool) -> None:
        """One forward and backward.

        Args:
            last: of a step.
        """
        ready: dict[int, float] = {}
        use = -1
        for span, seconds in zip(self._trace.spans, self._seconds, strict=True):
            phase, unit = span.event
            if phase in ("forward", "backward"):
                use += 1
                for coming in range(use, min(use + AHEAD + 1, len(self._uses))):
                    if coming not in ready:
                        again = coming > 0 and self._uses[coming] == self._uses[coming - 1]
                        ready[coming] = ready[coming - 1] if again else self._bring(self._uses[coming])
                self.now = max(self.now, ready[use])
            self.now += seconds
            self.computed += seconds
            if phase == "gradient" and self._gradients[unit]:
                self._reduce(self._gradients[unit], last)

    def _bring(self, unit: int) -> float:
        """When a unit's parameters are there, asked for now."""
        if not self._way.parameters:
            return self.now
        start = self.now
        if self._way.on_host:
            start = max(start, self._updated[unit])
            start = self._up.send(round(self._parameters[unit] / self._group.size), start)
        return self.fabric.start(self._group.all_gather(self._parameters[unit]), start)

    def _reduce(self, nbytes: int, last: bool) -> None:
        """A unit's gradients are complete."""
        way, fabric = self._way, self.fabric
        if not way.gradients and not last:
            return
        if not way.states:
            self._ends.append(fabric.start(self._world.all_reduce(nbytes), self.now))
            return
        end = fabric.start(self._group.reduce_scatter(nbytes), self.now)
        if way.in_node and last:
            end = fabric.start(self._nodes.all_reduce(nbytes / self._group.size), end)
        if way.on_host:
            end = self._down.send(round(nbytes / self._group.size), end)
        self._ends.append(end)

    def step(self) -> None:
        """The end of a step: gradients are there, and the update is done, or begun."""
        machine = self._machine
        self.now, self._ends = max(self.now, *self._ends), [0.0]
        if self._way.on_host:
            moment, disk = self.now, max(self._disk, self.now)
            for unit, nbytes in enumerate(self._updates):  # on its disks one thing after the other
                stored = self._stored[unit] / self._group.size
                if stored:
                    disk += stored * self._gpus / machine.disk_read
                    moment = max(moment, disk)
                moment += nbytes / self._group.size * self._gpus / machine.update
                if stored:
                    disk += stored * self._gpus / machine.disk_write
                self._updated[unit] = moment
            self._disk = disk
            return
        slices = self._group.size if self._way.states else 1
        self.updating = sum(self._updates) / slices / machine.compute_bandwidth
        self.now += self.updating
        if self._way.states and not self._way.parameters:
            self.now = self.fabric.start(self._world.all_gather(sum(self._parameters)), self.now)
