"""Feed outcore files and arguments that lie, for as long as asked: only its own errors may come out.

    python benchmarks/fuzz.py --seconds 600 [--seed 0] [--only NAME]

In turns: manifests (any bytes, and true ones with a field that lies under a digest that fits), headers of checkpoints
and of model weights, indexes, torch.distributed.checkpoint directories, machine files, sizes, the folder of a report,
and arguments of the command line. Whatever a lie leaves half done, the true checkpoint must mend, to the bit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cli"))

import torch
from calling import TINY, text
from calling import outcore as command
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import outcore
from checkpoint.runs import adamw
from outcore.checkpoint import manifest
from outcore.checkpoint.dcp import data as dcp_data
from outcore.checkpoint.dcp import metadata as dcp_metadata
from outcore.errors import OutcoreError
from outcore.memory.sizes import parse_size
from outcore.planning import machine_file

LARGE = "9" * 50
LEAVES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**53, 2**63, 2**64, -(2**70), 0.5, 1e308, "", "x", "F32", "BF16", "I64",
    "$tensor", "state.0", "../x.safetensors", "/etc/passwd", "0" * 32, "\x00", "\ud800", "é" * 300, [], {}, [[]],
    [0, 0], [1 << 40, 1 << 40], [-1], {"$float": "nan"}, {"$tuple": 3}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$x": 1},
    {"$counter": [["a", "b"]]}, {"$tensor": 7}, "nan", "inf", "14GiB", "-1GiB", "9" * 400,
]  # fmt: skip
DEEP = [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'"\\ud800"', b"1e999", b"\xff\xfe", b"NaN"]


VALUES = (
    *(
        "",
        "0",
        "-1",
        "1",
        "2",
        "nan",
        "inf",
        "1e400",
        LARGE,
        "14GiB",
        "8MiB",
        "x",
        "/",
        ".",
        "/dev/null",
        "\u0661",
        "a,b",
    ),
    *(
        ":",
        "::",
        "--",
        "~",
        "gpt2-tiny",
        "cpu",
        "fp16",
        "bf16",
        "keep",
        "recompute",
        "auto",
        "adamw",
        "sgd",
        "hf",
        "dcp",
    ),
    *("json", "é\u202e", "cuda:99", "n" * 300, "a\x00b", "\ud800", "x" * 300 + ":1MiB", "~nobody/x", "a\nb"),
)
OPTIONS = {
    "train": "--model --data --device --device-memory --host-memory --disk --seq-len --batch-size --accumulate --lr "
    "--clip --optimizer --precision --activations --microbatch --seed --trace-steps --every --keep --grace "
    "--checkpoint --log-dir",
    "generate": "--model --prompt --max-new-tokens --device --host-memory --disk --precision --seed --temperature",
    "plan": "--model --machine --device-memory --host-memory --disk --seq-len --batch-size --accumulate --micro-batch "
    "--optimizer --precision --activations --chunk-size --ranks",
    "inspect": "--verify",
    "export": "--dtype --model --format",
    "report": "--output",
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x))


def garble(chance: random.Random, raw: bytes, first: int | None = None) -> bytes:
    """The bytes with a few changed, cut, doubled or replaced; of the ``first`` so many, if given."""
    if chance.random() < 0.02:
        return chance.choice(DEEP)
    data = bytearray(raw)
    for _ in range(chance.randint(1, 5)):
        end = max(1, min(first or len(data), len(data)))
        at = chance.randrange(end)
        match chance.randrange(5):
            case 0 | 1:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                del data[at : at + chance.randint(1, 20)]
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 40)]
            case _:
                data[at : at + 8] = chance.randbytes(8)
        if not data:
            break
    return bytes(data)


def lie(chance: random.Random, value: Any) -> Any:
    """A copy with one to three entries that are gone or another."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        node = value
        for _ in range(chance.randrange(7)):
            inner = [
                v
                for v in (node.values() if isinstance(node, dict) else node)
                if isinstance(v, (dict, list)) and v
            ]
            if not inner:
                break
            node = chance.choice(inner)
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            continue
        key = chance.choice(keys)
        if chance.random() < 0.3:
            del node[key]
        else:
            node[key] = copy.deepcopy(chance.choice(LEAVES))
    return value


class Fuzzer:
    """A true checkpoint, export, dcp directory and report, and models to load their lies into."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        torch.manual_seed(0)
        self.model = Small()
        self.optimizer = adamw(self.model.parameters())
        outcore.offload(self.model, self.optimizer, budget=outcore.Budget(host="64MiB"))
        loss = self.model(torch.ones(2, 8)).float().square().mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.saved = folder / "saved"
        outcore.save(self.saved, self.model, self.optimizer, extra={"a": (1, float("inf")), 5: torch.ones(3)})
        self.body = json.loads((self.saved / manifest.NAME).read_text())["body"]
        self.true = {name: value.clone() for name, value in outcore.weights(self.model)}
        self.groups = [dict(group) for group in self.optimizer.param_groups]
        plain = Small()
        save_file(
            {name: value.contiguous() for name, value in plain.state_dict().items()},
            folder / "model.safetensors",
        )
        self.weights = (folder / "model.safetensors").read_bytes()
        dcp.save({"model": plain.state_dict()}, checkpoint_id=folder / "dcp")
        outcore.release(plain)
        self.log = folder / "log"
        text(folder)
        done = command("train", *TINY, "--data", folder / "words.txt", "--log-dir", self.log, "--steps", "2")
        assert done.exit_code == 0, done.output
        self.machine = machine_file.write(machine_file.DESCRIBED[next(iter(machine_file.DESCRIBED))]).encode()
        self.targets: dict[str, tuple[int, Callable[[], None]]] = {
            "manifests of any bytes": (200, self.any_manifest),
            "manifests that lie": (20, self.lying_manifest),
            "checkpoint headers": (20, self.header),
            "model weights": (20, self.model_weights),
            "indexes": (20, self.index),
            "dcp streams": (200, self.dcp_stream),
            "dcp directories": (20, self.dcp_directory),
            "machine files": (50, self.machines),
            "sizes": (500, self.sizes),
            "report folders": (5, self.report),
            "arguments": (2, self.arguments),
        }

    def mend(self) -> None:
        """The true checkpoint loads and is as it was."""
        for group, old in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(old)
        outcore.load(self.saved, self.model, self.optimizer)
        found = dict(outcore.weights(self.model))
        assert all(torch.equal(found[name], value) for name, value in self.true.items()), "another state"

    @contextlib.contextmanager
    def instead(self, path: Path, data: bytes) -> Any:
        """Other bytes in a file, for a while."""
        good = path.read_bytes()
        path.write_bytes(data)
        try:
            yield
        finally:
            path.write_bytes(good)

    # -- targets ----------------------------------------------------------------------------------

    def any_manifest(self) -> None:
        raw = (self.saved / manifest.NAME).read_bytes()
        with contextlib.suppress(OutcoreError):
            manifest.parse(garble(self.chance, raw))

    def lying_manifest(self) -> None:
        try:
            sealed = manifest.seal(lie(self.chance, self.body))
        except UnicodeEncodeError:  # no file can say that
            return
        with self.instead(self.saved / manifest.NAME, sealed), contextlib.suppress(OutcoreError):
            self.chance.choice([self._load, self._verify, self._to_dcp])()
        self.mend()

    def header(self) -> None:
        file = self.chance.choice(sorted(self.saved.glob("*.safetensors")))
        with (
            self.instead(file, garble(self.chance, file.read_bytes(), 200)),
            contextlib.suppress(OutcoreError),
        ):
            self.chance.choice([self._load, self._verify])()
        self.mend()

    def _load(self) -> None:
        outcore.load(self.saved, self.model, self.optimizer)

    def _verify(self) -> None:
        outcore.verify(self.saved)

    def _to_dcp(self) -> None:
        target = self.folder / "to"
        try:
            outcore.to_dcp(self.saved, target)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _offload(self, folder: Path) -> None:
        model = Small()
        with contextlib.suppress(OutcoreError):
            outcore.offload(model, budget=outcore.Budget(host="16MiB"), weights=folder)
        outcore.release(model)

    def model_weights(self) -> None:
        place = self.folder / "weights"
        place.mkdir(exist_ok=True)
        (place / "model.safetensors").write_bytes(garble(self.chance, self.weights, 400))
        self._offload(place)

    def index(self) -> None:
        place = self.folder / "sharded"
        place.mkdir(exist_ok=True)
        (place / "a.safetensors").write_bytes(self.weights)
        names = ["up.weight", "up.bias", "down.weight", "down.bias"]
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        raw = json.dumps(lie(self.chance, index)).encode()
        file = place / "model.safetensors.index.json"
        file.write_bytes(garble(self.chance, raw) if self.chance.random() < 0.5 else raw)
        self._offload(place)

    def dcp_stream(self) -> None:
        raw = (self.folder / "dcp" / ".metadata").read_bytes()
        with contextlib.suppress(OutcoreError):
            if self.chance.random() < 0.5:
                dcp_metadata.parse(garble(self.chance, raw))
            else:
                noise = b"\x80\x04" + self.chance.randbytes(self.chance.randrange(200))
                dcp_data.read(noise, dcp_metadata.NAMES, "it")

    def dcp_directory(self) -> None:
        file = self.chance.choice([".metadata", "__0_0.distcp"])
        path = self.folder / "dcp" / file
        with self.instead(path, garble(self.chance, path.read_bytes())), contextlib.suppress(OutcoreError):
            outcore.from_dcp(self.folder / "dcp", self.model)
        self.mend()

    def machines(self) -> None:
        path = self.folder / "machine.toml"
        path.write_bytes(garble(self.chance, self.machine))
        with contextlib.suppress(OutcoreError):
            machine_file.read(path)

    def sizes(self) -> None:
        signs = "0123456789.eE+-_ kKmMgGtTpPiIbBsS\x00\n\u0661\u00bd,"
        value = "".join(self.chance.choice(signs) for _ in range(self.chance.randrange(12)))
        with contextlib.suppress(OutcoreError):
            found = parse_size(self.chance.choice([value, value, value, self.chance.choice(LEAVES)]))
            assert 0 < found < 1 << 63

    def report(self) -> None:
        file = self.chance.choice([place for place in sorted(self.log.rglob("*")) if place.is_file()])
        with self.instead(file, garble(self.chance, file.read_bytes())):
            self._check("report", self.log, "--output", self.folder / "page.html")

    def arguments(self) -> None:
        chance = self.chance
        values = [*VALUES, str(self.folder), str(self.saved), f"{self.folder}:1MiB"]
        name = chance.choice(list(OPTIONS))
        given: dict[str, str] = {}
        for option in chance.sample(
            OPTIONS[name].split(), min(chance.randint(1, 3), len(OPTIONS[name].split()))
        ):
            given[option] = chance.choice(values)
        small = {"--model": "gpt2-tiny", "--seq-len": "16", "--batch-size": "1"}
        base: dict[str, str] = {}
        if name == "train":
            base = small | {
                "--data": str(self.folder / "words.txt"),
                "--host-memory": "64MiB",
                "--steps": "1",
            }
            base["--log-dir"] = str(self.folder / "fuzzed-log")
        elif name == "plan":
            base = small | {"--host-memory": "64MiB"}
        given["--output"] = str(self.folder / "page.html") if name == "report" else given.pop("--output", "")
        words = [
            part
            for option, value in (base | given).items()
            if value or option != "--output"
            for part in (option, value)
        ]
        if name in ("inspect", "export", "report"):
            words += chance.sample(
                [str(self.saved), str(self.log), str(self.folder / "out"), *values], chance.randrange(3)
            )
        self._check(name, *words)
        for left in ("out", "fuzzed-log"):
            shutil.rmtree(self.folder / left, ignore_errors=True)

    def _check(self, *words: object) -> None:
        done = command(*words)
        said = done.stderr
        fine = done.exit_code in (0, 1, 2, 3) and "error: unexpected " not in said and "Traceback" not in said
        assert fine, (
            f"outcore {' '.join(map(repr, words))}: {done.exit_code}: {said[-400:]} {done.exception!r}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        fuzzer = (
            Fuzzer(Path(folder) / "all", options.seed) if (Path(folder) / "all").mkdir() is None else None
        )
        assert fuzzer is not None
        targets = {
            name: target
            for name, target in fuzzer.targets.items()
            if not options.only or name in options.only
        }
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for name, (times, act) in targets.items():
                for _ in range(times):
                    counts[name] += 1
                    try:
                        act()
                    except Exception as error:
                        where = traceback.extract_tb(error.__traceback__)[-1]
                        kind = f"{name}: {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[
                            :700
                        ]
                        faults[kind] += 1
                        if faults[kind] == 1:
                            print(kind, flush=True)
                        with contextlib.suppress(OutcoreError):
                            fuzzer.mend()
        outcore.release(fuzzer.model)
        os.chdir("/")
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(f"{sum(counts.values()):,} cases, {sum(faults.values())} with another error than outcore's own")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
