"""Bytes that a step moves between host and disk, over the least that it must.

Two bounds are set beside what moved. *By formula*: 14 bytes read and 12 written per parameter where nothing stays on
the host (parameters twice and states once, each written once), less, each way, the room that is left for chunks where
activations take the most. It knows nothing of gradients, which must wait for the norm on the host or on the disk, and
nothing of the room that there is at other moments: what moves may be above it or below. *By order*: the least that any
policy moves which sees the order of uses of a step of this run and the room that its activations leave at each moment
(``sides/least.py``); nothing is below that. It needs scipy. Bytes don't depend on how busy a machine is, or hardly::

    python benchmarks/traffic.py --directory /nvme --quick --json traffic.json
    python benchmarks/traffic.py --directory /nvme --report
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.chunks.chunk import Kind
from outcore.memory.sizes import parse_size
from outcore.offloaded import engine_of
from sides.least import least
from sides.report import machine, table, write_json, write_report
from sides.training import Outcore, Settings
from sides.uses import Order, Recorder
from sides.without import do_without

MB = 1e6
LINKS = ("disk read", "disk write")
KINDS = tuple(kind.value for kind in (Kind.PARAMETER, Kind.STATE, Kind.GRADIENT))


@dataclass(frozen=True)
class Setting:
    """What is run: a model, a batch, and a host budget."""

    model: str
    rows: int
    tokens: int
    host: str

    @property
    def name(self) -> str:
        return f"{self.model}, {self.rows} x {self.tokens}, {self.host}"


SETTINGS = (
    Setting("gpt2", 4, 256, "768MiB"),
    Setting("gpt2", 4, 256, "512MiB"),
    Setting("gpt2-medium", 2, 256, "1536MiB"),
)


def measure(setting: Setting, folder: str, warm: int, steps: int) -> dict[str, Any]:
    """Bytes of each counted step, and the bounds."""
    asked = Settings(
        "outcore, disk",
        setting.model,
        setting.rows,
        setting.tokens,
        "cpu",
        folder,
        {"host": setting.host},
        loss_slice=128,
    )
    run = Outcore(asked, disk=True)
    engine = engine_of(run.model)
    step, recorder, orders = run.optimizer.step, Recorder(engine.pool), list[Order]()

    def stepped() -> None:
        orders.append(recorder.take())
        step()

    run.optimizer.step = stepped
    for number in range(warm + steps + 1):
        run.step(asked.batch(number))
    moved = [order.moved for order in orders[-steps:]]
    found: dict[str, Any] = {
        "moved": [
            {f"{link}, {kind}": one.get((link, kind), 0) for link in LINKS for kind in KINDS} for one in moved
        ],
        **by_formula(engine, parse_size(setting.host)),
    }
    bounds = [least(order) for order in orders[-steps:]]
    found["least by order"] = [
        {f"{link}, {kind}": one.get((link, kind), 0.0) for link in LINKS for kind in KINDS}
        for one in bounds
        if one is not None
    ]
    engine.shut()
    return found


def by_formula(engine: Any, budget: int) -> dict[str, float]:
    """Read and written bytes without a host cache, and less what fits: the whole budget, or what activations leave."""
    stores = [store for unit in engine.units for store in unit.stores]
    parameters = sum(chunk.nbytes for store in stores for chunk in store.parameters)
    states = sum(chunk.nbytes for store in stores for chunk in store.states)
    nothing = 3 * parameters + 2 * states
    return {
        "parameters": parameters,
        "states": states,
        "by formula, no host": nothing,
        "by formula, room left": nothing - 2 * engine.pool.floor,
        "by formula, all of the budget": nothing - 2 * budget,
        "room left": engine.pool.floor,
    }


def total(found: dict[str, float]) -> float:
    return sum(found.values())


def summary(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, found in results.items():
        moved = statistics.median(map(total, found["moved"]))
        gradients = statistics.median(map(of_gradients, found["moved"]))
        formula = found["by formula, room left"]
        ratios = f"{moved / formula:.3f}; {(moved - gradients) / formula:.3f}"
        row = [name, f"{found['room left'] / MB:,.0f}", f"{moved / MB:,.0f}", f"{gradients / MB:,.0f}"]
        row += [f"{formula / MB:,.0f}", ratios]
        if found["least by order"]:
            pairs = zip(found["moved"], found["least by order"], strict=True)
            over = ", ".join(f"{total(one) / total(bound):.3f}" for one, bound in pairs)
            row += [", ".join(f"{total(bound) / MB:,.0f}" for bound in found["least by order"]), over]
        rows.append(row)
    return rows


def of_gradients(moved: dict[str, float]) -> float:
    return sum(nbytes for name, nbytes in moved.items() if name.endswith(Kind.GRADIENT.value))


def kinds_of(found: dict[str, Any]) -> list[list[str]]:
    """By link and kind: what moved in each step, and the least of each."""
    rows = []
    for link in LINKS:
        for kind in KINDS:
            name = f"{link}, {kind}"
            moved = ", ".join(f"{one[name] / MB:,.0f}" for one in found["moved"])
            bound = ", ".join(f"{one[name] / MB:,.0f}" for one in found["least by order"])
            rows.append([name, moved, bound])
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--quick", action="store_true", help="the first setting alone")
    parser.add_argument("--setting", nargs=4, metavar=("MODEL", "ROWS", "TOKENS", "HOST"), help="another one")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--without", help="an idea of sides/without.py to turn off")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", action="store_true", help="write a dated page under docs/benchmarks")
    return parser.parse_args()


def main() -> None:
    options = parse()
    about = machine()
    torch.manual_seed(0)
    settings = SETTINGS[:1] if options.quick else SETTINGS
    if options.setting:
        model, rows, tokens, host = options.setting
        settings = (Setting(model, int(rows), int(tokens), host),)
    if options.without:
        do_without(options.without)
    results = {}
    for setting in settings:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            results[setting.name] = measure(setting, folder, options.warm, options.steps)
    head = [
        "MB a step (moved over it)",
        "room left",
        "moved",
        "by formula, no host",
        "less the room left",
        "by order",
    ]
    parts = [table(head, summary(results))]
    for name, found in results.items():
        parts += [f"{name}, MB in each step:", table(["", "moved", "least by order"], kinds_of(found))]
    print("", *parts, sep="\n\n")
    if options.json:
        write_json(options.json, {"machine": about, "results": results})
    if options.report:
        given = ["DIR" if "/" in argument else argument for argument in sys.argv[1:]]
        shown = " ".join(["python benchmarks/traffic.py", *given])
        print(write_report("traffic", "Bytes moved over the least", shown, parts, about))


if __name__ == "__main__":
    main()
