"""The memory table of the field: what each strategy keeps on which tier, per rank.

Bytes per parameter with Adam in mixed precision, W ranks (Rajbhandari et al. 2020, "ZeRO: memory optimizations
toward training trillion parameter models", section 3.1, K = 12; Ren et al. 2021, "ZeRO-Offload", table 1;
Rajbhandari et al. 2021, "ZeRO-Infinity", section 3):

=====================  ==================  ==================  =========
strategy               device              host                disk
=====================  ==================  ==================  =========
mixed precision        16                  0                   0
ZeRO-1                 4 + 12 / W          0                   0
ZeRO-2                 2 + 14 / W          0                   0
ZeRO-3                 16 / W              0                   0
ZeRO-Offload           2                   14 / W              0
ZeRO-Infinity, host    largest unit        16 / W              0
ZeRO-Infinity, NVMe    largest unit        buffers             18 / W
outcore                largest unit        up to 14            the rest
=====================  ==================  ==================  =========

Activations, working set and logits come on top where the model computes, as the traced step has them. Frozen
parameters cost their own bytes alone. A factor 12 becomes what the optimizer's own states are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outcore.memory.ledger import TIERS
from outcore.model.unit import Unit
from outcore.planning.fake_step import Trace
from outcore.planning.machine import Machine
from outcore.planning.recorder import CATEGORIES

KINDS = (
    "parameters",
    "gradients",
    "master weights",
    "moments",
    "buffers",
    "activations",
    "working set",
    "logits",
)
"""What memory is for. The working set is units gathered for use and what operators need for a moment."""

NVME_PARAMETER_BUFFERS = 5 * 10**8 * 2
"""Bytes of DeepSpeed's ``offload_param`` buffers by default: 5 of 1e8 elements in 16 bits (its configuration page)."""

NVME_STATE_BUFFERS = 4
"""DeepSpeed's ``offload_optimizer`` buffers by default, each for the fp32 elements of its largest parameter."""


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        name: of the strategy.
        tiers: tier to kind to bytes, per rank.
        fits: whether each rank fits the machine.
    """

    name: str
    tiers: Mapping[str, Mapping[str, int]]
    fits: bool

    def total(self, tier: str) -> int:
        """Bytes on a tier."""
        return sum(self.tiers[tier].values())


@dataclass(frozen=True)
class Sizes:
    """The bytes of a model's states, by kind, of the largest unit (parameters and gradients), and of the parameters
    of a usual one (``unit``)."""

    parameters: int
    frozen: int
    gradients: int
    moments: int
    buffers: int
    trained: int
    largest: int
    largest_parameter: int
    unit: int

    @classmethod
    def of(cls, units: Sequence[Unit], buffers: int) -> Sizes:
        stores = [store for unit in units for store in unit.stores]
        trained = [store for store in stores if store.run.trained]
        count = sum(_numel(store) for store in trained)
        moments = sum(
            plane.nbytes(_numel(store))
            for store in trained
            for plane in store.planes
            if plane.name not in ("low", "master")
        )
        bytes_of = [
            sum(_numel(s) * s.run.dtype.itemsize * (2 if s.run.trained else 1) for s in unit.stores)
            for unit in units
        ]
        return cls(
            parameters=sum(_numel(s) * s.run.dtype.itemsize for s in trained),
            frozen=sum(_numel(s) * s.run.dtype.itemsize for s in stores if not s.run.trained),
            gradients=sum(_numel(s) * s.run.dtype.itemsize for s in trained),
            moments=moments,
            buffers=buffers,
            trained=count,
            largest=max(bytes_of),
            largest_parameter=max(slot.numel for s in stores for slot in s.run.slots),
            unit=sorted(sum(s.run.nbytes for s in unit.stores) for unit in units)[len(units) // 2],
        )


def _numel(store: object) -> int:
    return sum(slot.numel for slot in store.run.slots)  # type: ignore[attr-defined]


def table(sizes: Sizes, trace: Trace, machine: Machine, ranks: int, outcore: Mapping[str, int]) -> list[Row]:
    """All strategies on one machine per rank.

    Args:
        sizes: of the model.
        trace: of a micro-batch.
        ranks: over which ZeRO shards, each with a machine's memory of its own.
        outcore: the bytes that a plan of outcore's holds at its peak on each tier, on one rank.
    """
    share = Share(sizes, trace, ranks)
    rows = [
        share.row("mixed precision", device=(1, 1, 1)),
        share.row("ZeRO-1", device=(1, 1, 1 / ranks)),
        share.row("ZeRO-2", device=(1, 1 / ranks, 1 / ranks)),
        share.row("ZeRO-3", device=(1 / ranks,) * 3, gathers=1),
        share.row("ZeRO-Offload", device=(1, 0, 0), host=(0, 1 / ranks, 1 / ranks)),
        share.row("ZeRO-Infinity, host", host=(1 / ranks,) * 3, gathers=1),
        share.row("ZeRO-Infinity, NVMe", disk=(1 / ranks, 2 / ranks, 1 / ranks), gathers=1, swaps=True),
    ]
    rows.append(_ours(sizes, trace, outcore, machine.device is None))
    room = {"device": machine.device or 0, "host": machine.host, "disk": machine.disk}
    return [_fitted(row, room, machine.device is None) for row in rows]


class Share:
    """Makes rows from shares of parameters, gradients and states on each tier."""

    def __init__(self, sizes: Sizes, trace: Trace, ranks: int) -> None:
        self._sizes = sizes
        self._beside = beside(trace)
        self._ranks = ranks

    @property
    def masters(self) -> int:
        """Bytes that fp32 masters take in outcore, beside the parameters that they share their upper half with."""
        s = self._sizes
        return 2 * s.trained if s.parameters == 2 * s.trained else 4 * s.trained if s.parameters else 0

    def row(
        self,
        name: str,
        *,
        device: tuple[float, float, float] = (0, 0, 0),
        host: tuple[float, float, float] = (0, 0, 0),
        disk: tuple[float, float, float] = (0, 0, 0),
        gathers: int = 0,
        swaps: bool = False,
        half: int | None = None,
    ) -> Row:
        """A row.

        Args:
            device: shares of parameters, gradients, and master weights with moments there; so ``host`` and ``disk``.
            gathers: units that are gathered at one time.
            half: bytes of master weights, where they are not 4 for each parameter.
        """
        s = self._sizes
        whole = 4 * s.trained if s.parameters < 4 * s.trained else 0
        whole = whole if half is None else half
        tiers: dict[str, dict[str, int]] = {}
        for tier, (p, g, o) in zip(TIERS, (device, host, disk), strict=True):
            tiers[tier] = {
                "parameters": round(p * (s.parameters + s.frozen)),
                "gradients": round(g * s.gradients),
                "master weights": round(o * whole),
                "moments": round(o * s.moments),
                "buffers": s.buffers if tier == "device" else 0,
                "working set": 0,
            }
        for kind, nbytes in self._beside.items():
            tiers["device"][kind] = tiers["device"].get(kind, 0) + nbytes
        if gathers:
            tiers["device"]["working set"] += s.largest + (gathers - 1) * s.unit
        if swaps:
            states = 4 * s.largest_parameter * (2 + s.moments // max(1, 4 * s.trained))
            tiers["host"]["working set"] += NVME_PARAMETER_BUFFERS + NVME_STATE_BUFFERS * states
        return Row(name, tiers, False)


def beside(trace: Trace) -> dict[str, int]:
    """Activations, working set and logits at the moment of the traced step at which they are most together."""
    parts = dict(zip(CATEGORIES, max(trace.spans, key=lambda span: span.peak).parts, strict=True))
    return {
        "activations": parts["activations"] + parts["inputs"],
        "working set": parts["working set"] + parts["gradients"],
        "logits": parts["logits"],
    }


def _ours(sizes: Sizes, trace: Trace, peak: Mapping[str, int], on_host: bool) -> Row:
    """A plan's peaks, with what is known of their parts."""
    computing = "host" if on_host else "device"
    tiers: dict[str, dict[str, int]] = {tier: {} for tier in TIERS}
    tiers[computing] |= beside(trace) | {"buffers": sizes.buffers}
    rest = peak.get(computing, 0) - sum(tiers[computing].values())
    if not on_host:
        tiers["device"]["working set"] += max(0, rest)
    low = 2 * sizes.trained if sizes.parameters == 2 * sizes.trained else 0
    states = {
        "parameters": sizes.parameters + sizes.frozen,
        "gradients": sizes.gradients,
        "master weights": low,
        "moments": sizes.moments,
    }
    whole = sum(states.values())
    for tier, room in (("host", rest if on_host else peak.get("host", 0)), ("disk", peak.get("disk", 0))):
        for kind, nbytes in states.items():
            tiers[tier][kind] = max(0, round(nbytes * min(1.0, room / max(1, whole))))
    return Row("outcore", tiers, False)


def _fitted(row: Row, room: Mapping[str, int], on_host: bool) -> Row:
    """Where the CPU computes, what others keep on a device lies on the host too."""
    tiers = {tier: dict(kinds) for tier, kinds in row.tiers.items()}
    if on_host and any(tiers["device"].values()):
        for kind, nbytes in tiers["device"].items():
            tiers["host"][kind] = tiers["host"].get(kind, 0) + nbytes
        tiers["device"] = {}
    fits = all(sum(kinds.values()) <= room[tier] for tier, kinds in tiers.items())
    return Row(row.name, tiers, fits)
