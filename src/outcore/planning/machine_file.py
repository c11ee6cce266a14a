"""Machines in TOML files: what a user describes, and what ``outcore profile`` measured.

::

    name = "the box under the desk"
    device = "24GiB"            # leave out where the CPU computes
    host = "128GiB"
    disk = "2TB"
    link_in = 25e9              # bytes per second
    link_out = 25e9
    disk_read = "3.5GB"         # a rate may be written as a size: what passes in a second
    disk_write = 3e9
    compute_bandwidth = 1008e9
    host_bandwidth = 60e9
    update = 40e9
    reached = 0.6
    overhead = 5e-6
    endurance = "1200TB"

    [flops]
    bf16 = 165e12
    fp32 = 82e12
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from outcore.errors import UsageError
from outcore.memory.sizes import parse_size
from outcore.planning.machine import DESCRIBED, NAMES, RATES, SIZES, Machine

LIMIT = 64 << 10
"""Bytes a description may have; more is no description."""

_DEFAULTS: dict[str, Any] = {
    "device": None,
    "disk": 0,
    "link_in": 0.0,
    "link_out": 0.0,
    "disk_read": 0.0,
    "disk_write": 0.0,
    "reached": 0.6,
    "overhead": 5e-6,
    "endurance": 0,
    "date": "",
    "both": 0.0,
    "io_turn": 0.0,
    "io_rate": 0.0,
    "update_turn": 0.0,
    "attention": 1.0,
    "in_node": 0.0,
    "network": 0.0,
    "slowed": 1.0,
    "turn": 0.0,
    "use": 0.0,
}

_RETIRED = frozenset({"taxed"})
"""Names that profiles of older versions have. They say nothing any more."""


def read(path: Path) -> Machine:
    """A machine from a file.

    Raises:
        UsageError: the file can't be read, is not TOML, or says something that no machine can be.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT + 1)
    except OSError as error:
        raise UsageError(f"the machine file {path} can't be read: {error.strerror or error}") from None
    if len(raw) > LIMIT:
        raise UsageError(f"the machine file {path} is larger than {LIMIT:,} bytes: it is no description")
    try:
        table = tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the machine file {path} is not TOML: {' '.join(str(error).split())}") from None
    try:
        return from_table(table, path.stem)
    except UsageError as error:
        raise UsageError(f"the machine file {path}: {error}") from None


def from_table(table: Mapping[str, Any], name: str) -> Machine:
    """A machine from the names and values of its file.

    Raises:
        UsageError: a name is unknown or missing, or a value can't be.
    """
    table = {known: value for known, value in table.items() if known not in _RETIRED}
    unknown = sorted(set(table) - set(NAMES))
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not known: choose from {', '.join(NAMES)}")
    values = {"name": name, **_DEFAULTS, **table}
    missing = [known for known in NAMES if known not in values]
    if missing:
        raise UsageError(f"{', '.join(missing)} must be stated")
    for text in ("name", "date"):
        if not isinstance(values[text], str) or len(values[text]) > 200 or not values[text].isprintable():
            raise UsageError(f"{text} must be a line of text, and is {str(values[text])[:40]!r}")
    for size in SIZES:
        if values[size] not in (None, 0):
            values[size] = _size(size, values[size])
    for rate in RATES:
        if isinstance(values[rate], str):
            values[rate] = float(_size(rate, values[rate]))
    if not isinstance(values["flops"], Mapping):
        raise UsageError("flops must be a table: [flops], then lines such as bf16 = 165e12")
    values["flops"] = dict(values["flops"])
    for share in (
        "reached",
        "overhead",
        "both",
        "slowed",
        "turn",
        "io_turn",
        "use",
        "update_turn",
        "attention",
    ):
        if isinstance(values[share], bool) or not isinstance(values[share], (int, float)):
            raise UsageError(f"{share} must be a number, and is {values[share]!r}")
    return Machine(**values)


def _size(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        value = int(value)  # 4e12
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise UsageError(f"{name} must be a size such as '24GiB', and is {str(value)[:40]!r}")
    try:
        return parse_size(value)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def write(machine: Machine) -> str:
    """The text of a file from which `read` makes the same machine."""
    lines = []
    for item in fields(Machine):
        value = getattr(machine, item.name)
        if item.name == "flops" or value is None:
            continue
        quoted = value.replace("\\", "\\\\").replace('"', '\\"') if isinstance(value, str) else ""
        lines.append(f'{item.name} = "{quoted}"' if isinstance(value, str) else f"{item.name} = {value!r}")
    rates = [f"{dtype} = {rate!r}" for dtype, rate in machine.flops.items()]
    return "\n".join([*lines, "", "[flops]", *rates, ""])


def by_name(name: str) -> Machine:
    """A described machine by its name, or one from a file.

    Raises:
        UsageError: there is no such machine, or its file won't do.
    """
    if name in DESCRIBED:
        return DESCRIBED[name]
    path = Path(name).expanduser()
    if path.suffix == ".toml" or path.is_file():
        return read(path)
    raise UsageError(
        f"unknown machine {name!r}: choose from {', '.join(DESCRIBED)}, this, or name a TOML file"
    )
