"""What a comparison writes down: tables, the machine, the files of ``--json`` and ``--report``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from outcore.memory.sizes import format_size
from sides.turns import Score

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def machine() -> dict[str, str]:
    """The machine in words, with what else kept it busy."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _lines(Path("/proc/cpuinfo"))
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    release = ".".join(platform.release().split(".")[:2])
    found = {
        "processor": f"{model}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {release}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "load before": "{:.2f}, {:.2f}, {:.2f} (1, 5, 15 minutes)".format(*os.getloadavg()),
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        module = torch.get_device_module(device)
        named = module.get_device_name() if hasattr(module, "get_device_name") else device.type
        _, total = torch.accelerator.get_memory_info()
        found["accelerator"] = f"{named}, {total / 2**30:.0f} GiB"
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(readings: list[float]) -> str:
    """Median and extremes, in seconds."""
    return f"{statistics.median(readings):.2f} ({min(readings):.2f} to {max(readings):.2f})"


def training_rows(scores: Iterable[Score], tokens: int) -> Iterable[list[str]]:
    """One row a contender: step time, tokens per second, processor time, peak RSS; or why there is none."""
    for score in scores:
        if score.failure is not None:
            yield [score.name, f"failed: {score.failure}", "", "", ""]
        elif score.turns:
            rate = tokens / score.median("seconds")
            wall, processor = spread(score.readings("seconds")), f"{score.median('processor'):.2f}"
            yield [score.name, wall, f"{rate:.0f}", processor, peak(score)]


def peak(score: Score) -> str:
    """The largest peak RSS of its turns."""
    return format_size(int(score.most("peak_rss")))


def raw(scores: Iterable[Score]) -> dict[str, Any]:
    return {score.name: {"turns": score.turns, "failure": score.failure} for score in scores}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def write_report(name: str, title: str, command: str, parts: Sequence[str], about: Mapping[str, str]) -> Path:
    """A dated page under ``docs/benchmarks``."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{today}-{name}.md"
    where = "\n".join(f"- {what}: {said}" for what, said in about.items())
    text = f"# {title}\n\n{today}\n\n```sh\n{command}\n```\n\n{where}\n\n" + "\n\n".join(parts) + "\n"
    path.write_text(text, "utf-8")
    return path
