"""What a rank's process holds between steps, and what its sockets receive in one, beside what theory says.

On W = 1, 2 and 4 ranks of this machine, ``Sharding("parameters")``, a GPT-2 in bf16 over fp32 masters with AdamW.

Memory is PSS less that of the same process before (`sides.ranked` says how), against the table of 12 N / W bytes for N
parameters. Bytes are those that the kernel counted on the process's TCP sockets in each counted step, against the least
there can be: two gathers and one sum, (W-1)/W x 6 N. Where this process may (``CLONE_NEWNET``) the ranks run in a
network of their own, whose loopback device counts them once more, with headers and acknowledgements::

    python benchmarks/ranks.py --json ranks.json
    python benchmarks/ranks.py --apart

Ranks of one machine gather and sum through memory that they share, and only words cross a wire. ``--apart`` lets them
share none, as on different machines.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

from sides.report import machine, table, write_json
from sides.turns import Place, run_ranks

CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1


def own_network() -> bool:
    """Move this process into a network of its own, with nothing but a loopback device; false if it may not."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        print(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return True


def measure(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """What each rank found.

    Raises:
        SystemExit: a rank failed.
    """
    asked = {
        "model": options.model,
        "tokens": options.tokens,
        "steps": options.steps,
        "budget": options.host_budget,
        "precision": "bf16",
        "states": "parameters",
        "apart": options.apart,
    }
    with tempfile.TemporaryDirectory() as disk:
        place = Place(Path(disk), 1, timeout=options.patience, ranks=ranks)
        results, failure = run_ranks("sides.ranked", asked, place)
    if not results:
        raise SystemExit(f"{ranks} ranks: {failure}")
    return results


def memory_rows(found: dict[int, list[dict[str, Any]]]) -> list[list[str]]:
    rows = []
    for ranks, results in found.items():
        least = 12 * results[0]["parameters"] / ranks
        held = [result["pss"] - result["baseline"] for result in results]
        rows.append(
            [
                str(ranks),
                f"{least / 1e6:.1f}",
                ", ".join(f"{one / 1e6:.1f}" for one in held),
                ", ".join(f"{one / least:.3f}" for one in held),
                ", ".join(f"{result['ledger'] / least:.3f}" for result in results),
            ]
        )
    return rows


def wire_rows(found: dict[int, list[dict[str, Any]]], device: bool) -> list[list[str]]:
    rows = []
    for ranks, results in found.items():
        if ranks == 1:
            continue
        least = (ranks - 1) / ranks * 6 * results[0]["parameters"]
        sockets = [one / least for result in results for one in result["wire"]]
        counted = [one / least for result in results for one in result["counted"]]
        whole = [one / (ranks * least) for one in results[0]["device"]] if device else []
        rows.append(
            [
                str(ranks),
                f"{least / 1e6:.1f}",
                ", ".join(f"{one:.4f}" for one in sockets),
                ", ".join(f"{one:.4f}" for one in whole) or "not measured",
                f"{max(counted):.4f}",
            ]
        )
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-34m")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=64, help="of one row, which each rank has")
    parser.add_argument("--steps", type=int, default=2, help="counted ones, after one that is not")
    parser.add_argument("--host-budget", default="3GiB", help="of each rank")
    parser.add_argument("--apart", action="store_true", help="ranks share no memory")
    parser.add_argument("--patience", type=float, default=600.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    about = machine()
    device = own_network()
    found = {ranks: measure(options, ranks) for ranks in options.ranks}
    heads = [
        [
            "ranks",
            "12 N / W, MB",
            "PSS less baseline, MB, of each rank",
            "of the table",
            "ledger, of the table",
        ],
        [
            "ranks",
            "least, MB a step and rank",
            "sockets, of the least",
            "loopback device, of the least",
            "own counter",
        ],
    ]
    print(table(heads[0], memory_rows(found)), table(heads[1], wire_rows(found, device)), sep="\n\n")
    if options.json:
        readings = {str(ranks): results for ranks, results in found.items()}
        write_json(options.json, {"machine": about, "readings": readings})


if __name__ == "__main__":
    main()
