"""Is the searched plan the fastest? Each single way as it is by default, and the plan, in turns on this machine.

Three settings: all on the host; bound by the disk, with a third of the states on the host; and an emulated accelerator
whose memory holds little more than a step with recomputed blocks needs. In each, every way is set up once. Then they
take turns, a few steps each, so that all of them see each minute of the machine; the first step of a turn is not
counted, since it finishes what the way before left to do. Of a way the median of its turns is compared.

    python benchmarks/searched_plan.py --folder DIR [--quick] [--only host|disk|device] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import outcore
from outcore.errors import BudgetError
from outcore.planning.machine import Machine
from outcore.planning.measure import measure as profile
from outcore.planning.outcome import Limits
from outcore.planning.planner import Planner
from outcore.planning.settings import Settings
from outcore.planning.this import Here
from plan_accuracy import Timed, gpt2, ids
from planning.accuracy import Case

SEQUENCES = 8
CHUNK = 8 << 20
"""What `outcore.offload` takes by default."""

LINK = 0.5
"""GB/s of the emulated accelerator's links: about as long as its computing then."""

ROOM = 4 << 30
KINDS = ("host", "disk", "device")


def precision(device: str) -> outcore.Precision:
    """The emulated accelerator computes in fp32: where the processor has no instructions for bf16, it multiplies that
    in plain loops, whose speed depends on what is transposed as no accelerator's does."""
    return outcore.Precision("bf16" if device == "cpu" else "fp32")


@dataclass(frozen=True)
class Scale:
    """How large, and how long.

    Attributes:
        layers, width, length: of the model, and tokens of a sequence.
        rounds: turns of each way.
        steps: of a turn that count.
        seconds: of a setting, after which no round begins.
    """

    layers: int
    width: int
    length: int
    rounds: int
    steps: int
    seconds: float


QUICK = Scale(6, 384, 64, 5, 3, 75.0)
LONG = Scale(8, 512, 256, 7, 4, 1200.0)
WORDS = 4096


def ways() -> dict[str, Settings]:
    """Each way by itself, with the chunks of the default."""
    found = {}
    blocks: Any
    for micro, blocks in ((8, "keep"), (8, "recompute"), (8, "offload"), (2, "keep"), (2, "recompute")):
        settings = Settings(micro, SEQUENCES // micro, outcore.Activations(blocks), CHUNK)
        found[str(settings)] = settings
    sliced = Settings(SEQUENCES, 1, outcore.Activations("recompute", 2), CHUNK)
    return {**found, str(sliced): sliced}


class Way:
    """A model that trains in one way.

    Args:
        settings: the way's, or a plan that decides them.
    """

    def __init__(
        self, scale: Scale, settings: Settings | outcore.Plan, limits: Limits, device: str, folder: Path
    ) -> None:
        torch.manual_seed(7)
        self.model = gpt2(scale.layers, scale.width, WORDS).train()
        self._optimizer = outcore.AdamW(self.model.parameters())
        self._passes = settings.accumulate
        self._batch = {
            name: t.to(device) for name, t in ids(settings.micro_batch, scale.length, WORDS).items()
        }
        found: dict[str, Any] = {"budget": outcore.Budget(disk=f"{folder}:{limits.disk}")}
        if isinstance(settings, outcore.Plan):
            found["plan"] = settings
        else:
            found["budget"] = replace(found["budget"], device=limits.device, host=limits.host)
            found |= {"activations": settings.activations, "chunk_size": settings.chunk_bytes}
            found["precision"] = precision(device)
        outcore.offload(self.model, self._optimizer, device=device, **found)
        for _ in range(3):  # by then the order of uses is on record
            self._step()

    def _step(self) -> None:
        for _ in range(self._passes):
            self.model(**self._batch).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def turn(self, steps: int) -> float:
        """Seconds of a step, in the mean of so many after one that isn't counted."""
        self._step()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        return (time.perf_counter() - start) / steps


def budgets(scale: Scale, kind: str) -> Limits:
    """What each tier may hold: see the top of this file."""
    case = Case(
        lambda: gpt2(scale.layers, scale.width, WORDS),
        ids(SEQUENCES, scale.length, WORDS),
        device="emu" if kind == "device" else None,
        chunk=str(CHUNK),
        precision=precision("emu" if kind == "device" else "cpu").compute,
    )
    low = case.least(case.subject())
    if kind == "host":
        return Limits(None, ROOM, ROOM)
    if kind == "disk":
        return Limits(None, low.host * 5 // 4 + low.disk // 3, ROOM)
    assert low.device is not None
    return Limits(low.device * 5 // 4, ROOM, ROOM)


def compare(scale: Scale, kind: str, machine: Machine, folder: Path) -> dict[str, Any]:
    """All ways of one setting."""
    limits, device = budgets(scale, kind), "emu" if kind == "device" else "cpu"
    whole = Case(
        lambda: gpt2(scale.layers, scale.width, WORDS),
        ids(SEQUENCES, scale.length, WORDS),
        device=None if device == "cpu" else device,
        precision=precision(device).compute,
    )
    planner = Planner(whole.subject(), machine, limits)
    best = planner.best(SEQUENCES, 1, None, None, None, None, 1)  # as `outcore.plan`, with nothing named
    chosen = Settings(best.micro_batch, best.accumulate, best.activations, best.chunk_bytes)
    print(
        f"\n{kind}: {limits}\nsearched: {chosen}, chunks of {chosen.chunk_bytes >> 20} MiB, "
        f"the fastest of {best.tried}",
        flush=True,
    )
    rows: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        there: dict[str, Way] = {}
        for name, settings in {**ways(), "searched": best}.items():
            inside = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            try:
                way = Way(scale, settings, limits, device, inside)
            except BudgetError as error:
                print(f"{name}: doesn't fit: {error.tier}", flush=True)
                continue
            stack.callback(outcore.release, way.model)
            there[name] = way
            outcome = planner.fits(chosen if name == "searched" else settings)  # type: ignore[arg-type]
            rows[name] = {"planned": None if outcome is None else outcome.seconds, "turns": []}
        begin = time.perf_counter()
        for number in range(scale.rounds):
            if number > 1 and time.perf_counter() - begin > scale.seconds:
                break
            order = list(there) if number % 2 == 0 else list(reversed(there))
            for name in order:
                rows[name]["turns"].append(there[name].turn(scale.steps))
    for name, row in rows.items():
        row["measured"] = statistics.median(row["turns"])
        turns = ", ".join(f"{seconds:.3f}" for seconds in row["turns"])
        said = "not to fit" if row["planned"] is None else f"{row['planned']:.3f} s"
        print(f"{name:57} planned {said:10}  measured {row['measured']:.3f} s ({turns})", flush=True)
    other = min((name for name in rows if name != "searched"), key=lambda name: rows[name]["measured"])
    ratio = rows["searched"]["measured"] / rows[other]["measured"]
    pairs = [a / b for a, b in zip(rows["searched"]["turns"], rows[other]["turns"], strict=True)]
    print(
        f"searched: {ratio:.3f} of the fastest other, {other}; round by round {statistics.median(pairs):.3f}",
        flush=True,
    )
    return {"setting": kind, "chosen": str(chosen), "chunk": chosen.chunk_bytes, "ratio": ratio, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="a smaller model: under seven minutes on two cores"
    )
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    outcore.widen_matmuls()
    hf.logging.set_verbosity_error()
    scale = QUICK if options.quick else LONG
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    kinds = KINDS if options.only is None else (options.only,)
    if "device" in kinds:  # before any backward: autograd counts devices at its first
        from emulated import accelerator

        accelerator.load()
        accelerator.configure(h2d_gbps=LINK, d2h_gbps=LINK, checker=False, poison=False)
    here: dict[str, Timed] = {}
    found = []
    for kind in kinds:
        device = "emu" if kind == "device" else "cpu"
        if device not in here:
            here[device] = Timed(
                **vars(Here.of(profile(torch.device(device), options.folder), torch.device(device)))
            )
        found.append(compare(scale, kind, here[device], options.folder))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
