"""What a machine can do: bytes per tier, and how fast each part works.

[Note: What a figure means]
``flops`` are what the matrix units reach on paper, dense, with fp32 sums. No program reaches them, so a plan
multiplies by ``reached``: for a described machine a share that large matrix products are known to get, for a
profiled one 1, because what was measured is what was reached. Bandwidths are those of long transfers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from outcore.errors import UsageError
from outcore.planning.timing import Rates, Timing

DTYPES = ("bf16", "fp16", "fp32")
"""The precisions a machine states a rate for."""


@dataclass(frozen=True)
class Machine:
    """A machine with one accelerator, or none, or one node of many. Bandwidths in bytes per second.

    Attributes:
        name: for people.
        device: bytes of accelerator memory; ``None`` where the CPU computes.
        host: bytes of DRAM.
        disk: bytes of disk; 0 for none.
        flops: multiply and add operations per second, by precision.
        reached: share of ``flops`` that matrix products reach; see [Note: What a figure means].
        compute_bandwidth: of the memory of whatever computes.
        host_bandwidth: of DRAM, reads and writes together.
        link_in: host to device; 0 without a device.
        link_out: device to host; 0 without a device.
        disk_read: of all disks together.
        disk_write: likewise; reads and writes share the disks.
        update: bytes per second, read and written, of the update kernels on the host.
        overhead: seconds an operator takes beside its work (launch, dispatch).
        both: what computing and an update on the CPU reach together when both run, compared with one alone: 1 if each
            takes from the other what it gets, 2 if neither feels the other; 0 if unknown, which is 1 where the CPU
            computes and 2 where it doesn't.
        io_turn: seconds of computing that a transfer between host and disk costs, beside those of its bytes: what the
            disk's threads take of the processors that compute.
        io_rate: bytes that cost one more such second; 0: bytes cost none.
        slowed: the share of its speed that the disk keeps while something is computed.
        turn: seconds that a transfer between host and disk takes beside those of its bytes.
        update_turn: seconds that the update of a parameter, or of its part in a chunk, takes beside those of its bytes.
        use: seconds that a thread spends on a use of a chunk, where the CPU computes: it looks who comes and leaves.
        attention: FLOP/s of fused attention as a share of those of matrix products.
        in_node: from each accelerator to the others of its node, each way; 0 if there are no others.
        network: from each accelerator to other nodes, each way; 0 if there are none.
        endurance: bytes that may be written to the disks in their life, as their maker warrants; 0 if unknown.
        date: of the measurement; empty for a description.
    """

    name: str
    device: int | None
    host: int
    disk: int
    flops: Mapping[str, float] = field(hash=False)
    reached: float
    compute_bandwidth: float
    host_bandwidth: float
    link_in: float
    link_out: float
    disk_read: float
    disk_write: float
    update: float
    overhead: float
    endurance: int = 0
    date: str = ""
    both: float = 0.0
    io_turn: float = 0.0
    io_rate: float = 0.0
    update_turn: float = 0.0
    attention: float = 1.0
    in_node: float = 0.0
    network: float = 0.0
    slowed: float = 1.0
    turn: float = 0.0
    use: float = 0.0

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if value is None and name == "device":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
                raise UsageError(f"{name} must be a number of bytes, and is {value!r}")
        if self.host == 0 or self.device == 0:
            raise UsageError("a machine has host memory; leave device out where there is no accelerator")
        for name in RATES:
            self._check_rate(name, getattr(self, name), positive=name not in OPTIONAL_RATES)
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                raise UsageError(f"flops are stated for {', '.join(DTYPES)}, not for {dtype!r}")
            self._check_rate(f"flops of {dtype}", rate, positive=True)
        if not self.flops:
            raise UsageError(f"flops must be stated for at least one of {', '.join(DTYPES)}")
        if not 0 < self.reached <= 1:
            raise UsageError(f"reached must be a share above 0 and at most 1, and is {self.reached!r}")
        for name in ("overhead", "turn", "io_turn", "use", "update_turn"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} must be seconds, from 0 to below 1, and is {getattr(self, name)!r}")
        for name, most in (("both", 2), ("slowed", 1), ("attention", 4)):
            value = getattr(self, name)
            if not 0 < value <= most and not (name == "both" and value == 0):
                raise UsageError(f"{name} must be above 0 and at most {most}, and is {value!r}")
        if self.device is not None and not (self.link_in > 0 and self.link_out > 0):
            raise UsageError("a machine with a device needs link_in and link_out above 0")
        if self.disk and not (self.disk_read > 0 and self.disk_write > 0):
            raise UsageError("a machine with a disk needs disk_read and disk_write above 0")

    def _check_rate(self, name: str, value: object, positive: bool) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{name} must be a number per second, and is {value!r}")
        if not math.isfinite(value) or value < 0 or value > 1e24 or (positive and value == 0):
            raise UsageError(f"{name} must be a finite number above 0, and is {value!r}")

    @property
    def beside(self) -> float:
        """``both``, known or not."""
        return self.both or (1.0 if self.device is None else 2.0)

    def timing(self) -> Timing:
        """How long spans of a traced step take on it."""
        return Rates(self)

    def rate(self, dtype: str) -> float:
        """Operations per second that matrix products reach in this precision.

        Raises:
            UsageError: the machine states none.
        """
        try:
            return self.flops[dtype] * self.reached
        except KeyError:
            known = ", ".join(self.flops)
            raise UsageError(
                f"{self.name} states no FLOP/s for {dtype}: choose {known}, or add a line to its file"
            ) from None

    def sized(self, device: int | None = None, host: int | None = None, disk: int | None = None) -> Machine:
        """The same machine with other sizes; what is ``None`` stays.

        Raises:
            UsageError: a device size for a machine without a device.
        """
        if device is not None and self.device is None:
            raise UsageError(f"{self.name} computes on the CPU: a device size means nothing there")
        disk = self.disk if disk is None else disk
        speeds = {}
        if disk and self.disk_read == 0:
            speeds = {"disk_read": NVME_READ, "disk_write": NVME_WRITE}
        return replace(
            self,
            device=self.device if device is None else device,
            host=self.host if host is None else host,
            disk=disk,
            **speeds,  # type: ignore[arg-type]
        )


SIZES = ("device", "host", "disk", "endurance")
RATES = (
    "compute_bandwidth",
    "host_bandwidth",
    "link_in",
    "link_out",
    "disk_read",
    "disk_write",
    "io_rate",
    "update",
    "in_node",
    "network",
)
OPTIONAL_RATES = ("link_in", "link_out", "disk_read", "disk_write", "io_rate", "in_node", "network")
NAMES = tuple(f.name for f in fields(Machine))

GIB = 1 << 30
TB = 10**12

NVME_READ = 7.0e9
NVME_WRITE = 6.0e9
"""One PCIe 4.0 x4 NVMe disk of 2021 to 2024, sequential. Samsung 990 PRO data sheet, rev. 1.0: read 7.45, write
6.9 GB/s (4 TB); we take a little less, since writes slow down once the disk's cache of fast cells is full."""

NVME_ENDURANCE = 600 * TB
"""Per TB of capacity: 600 TBW is what that data sheet warrants for each TB."""


ETHERNET = 12.5e9
"""Of a machine that has no network for accelerators: 100 GbE."""


def _described(
    name: str,
    device: int,
    host: int,
    disk: int,
    bf16: float,
    fp32: float,
    memory: float,
    link: float,
    host_bandwidth: float,
    in_node: float = 0.0,
    network: float = 0.0,
) -> Machine:
    return Machine(
        name=name,
        device=device,
        host=host,
        disk=disk,
        flops={"bf16": bf16, "fp16": bf16, "fp32": fp32},
        reached=0.6,
        compute_bandwidth=memory,
        host_bandwidth=host_bandwidth,
        link_in=link,
        link_out=link,
        disk_read=NVME_READ,
        disk_write=NVME_WRITE,
        update=0.6 * host_bandwidth,
        overhead=5e-6,
        endurance=NVME_ENDURANCE * disk // TB,
        in_node=in_node or link,
        network=network or ETHERNET,
    )


# The memory sizes, memory bandwidths and FLOP/s of the accelerators are their maker's, cited line by line. The rest is
# assumed: 80 % of PCIe 4.0 x16's 31.5 and of PCIe 5.0 x16's 63 GB/s, five sixths of NVLink-C2C's 450 GB/s each way;
# ``reached`` 0.6; and of a usual machine around the card (two channels of DDR5-5600 around the 40 series, eight of
# DDR4-3200 or DDR5-4800 around the others) the host memory, the disks, 75 to 80 % of DRAM's peak, and 60 % of that
# for the update. ``outcore profile`` measures what is assumed here; sizes can be named, or a file written.
DESCRIBED: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # NVIDIA Ada GPU architecture whitepaper v2.1, table 3: 716.8 GB/s, tensor FP16 with fp32 sums 97.5 TFLOP/s
        # dense, FP32 48.7.
        _described("rtx4080", 16 * GIB, 64 * GIB, 2 * TB, 97.5e12, 48.7e12, 716.8e9, 25e9, 70e9),
        # The same whitepaper, table 2: 1008 GB/s, 165.2 TFLOP/s dense, FP32 82.6.
        _described("rtx4090", 24 * GIB, 256 * GIB, 4 * TB, 165.2e12, 82.6e12, 1008e9, 25e9, 70e9),
        # NVIDIA A100 80GB data sheet (SXM): 2039 GB/s, BF16 312 TFLOP/s dense, FP32 19.5; NVLink 600 GB/s both ways
        # together. DGX A100 data sheet: 200 Gb/s of InfiniBand for each.
        _described(
            "a100-80g", 80 * GIB, 512 * GIB, 4 * TB, 312e12, 19.5e12, 2039e9, 25e9, 150e9, 300e9, 25e9
        ),
        # NVIDIA H100 data sheet (SXM): 3.35 TB/s, BF16 1979 TFLOP/s with sparsity, so 989 dense; FP32 67; NVLink 900
        # GB/s both ways together. DGX H100 data sheet: 400 Gb/s of InfiniBand for each.
        _described("h100", 80 * GIB, 1024 * GIB, 8 * TB, 989e12, 67e12, 3350e9, 50e9, 250e9, 450e9, 50e9),
        # NVIDIA H200 data sheet (SXM): 141 GB at 4.8 TB/s, else as the H100.
        _described("h200", 141 * 10**9, 1024 * GIB, 8 * TB, 989e12, 67e12, 4800e9, 50e9, 250e9, 450e9, 50e9),
        # NVIDIA GH200 Grace Hopper data sheet: 96 GB HBM3 at 4 TB/s, 480 GB LPDDR5X at up to 512 GB/s, NVLink-C2C
        # 900 GB/s both ways together.
        _described(
            "gh200", 96 * 10**9, 480 * 10**9, 4 * TB, 989e12, 67e12, 4000e9, 375e9, 400e9, 375e9, 50e9
        ),
    )
}
"""Machines by the name of their accelerator."""
