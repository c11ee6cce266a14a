"""Machines: described ones make sense, files survive a round trip, and bad files are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.errors import UsageError
from outcore.planning.machine import DESCRIBED, Machine
from outcore.planning.machine_file import by_name, read, write

GOOD = """
device = "24GiB"
host = "64GiB"
disk = "2TB"
link_in = 25e9
link_out = 25e9
disk_read = "3.5GB"
disk_write = 3e9
compute_bandwidth = 1e12
host_bandwidth = 6e10
update = 4e10

[flops]
bf16 = 165e12
"""


def file(folder: Path, text: str | bytes) -> Path:
    path = folder / "box.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_all_that_were_asked_for_are_described() -> None:
    assert set(DESCRIBED) == {"rtx4080", "rtx4090", "a100-80g", "h100", "h200", "gh200"}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_described_machine_is_one(name: str) -> None:
    machine = by_name(name)
    assert machine.device is not None
    assert machine.device < machine.host < machine.disk
    assert machine.compute_bandwidth > machine.host_bandwidth > machine.disk_read >= machine.disk_write
    assert machine.rate("bf16") == pytest.approx(0.6 * machine.flops["bf16"])


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_file_keeps_all_of_it(name: str, tmp_path: Path) -> None:
    assert read(file(tmp_path, write(DESCRIBED[name]))) == DESCRIBED[name]


def test_a_profile_of_an_older_version_is_read(tmp_path: Path) -> None:
    older = GOOD.replace("[flops]", "taxed = 0.7\n\n[flops]")
    assert older != GOOD
    assert by_name(str(file(tmp_path, older))) == by_name(str(file(tmp_path, GOOD)))


def test_a_file_takes_sizes_and_rates(tmp_path: Path) -> None:
    machine = by_name(str(file(tmp_path, GOOD)))
    assert machine.name == "box"
    assert (machine.device, machine.host, machine.disk) == (24 << 30, 64 << 30, 2 * 10**12)
    assert machine.disk_read == 3.5e9


def test_other_sizes() -> None:
    machine = DESCRIBED["rtx4090"].sized(host=128 << 30, disk=0)
    assert (machine.device, machine.host, machine.disk) == (24 << 30, 128 << 30, 0)
    assert machine.sized(disk=10**12).disk_read > 0


HOSTILE = {
    "not TOML": ("device = = 3", "is not TOML"),
    "not text": (b"\xff\xfe\x00", "is not TOML"),
    "a nest": ("a = " + "[" * 5000, "is not TOML"),
    "an unknown name": ("cores = 5\n" + GOOD, "'cores' is not known"),
    "a missing name": (GOOD.replace('host = "64GiB"', ""), "host must be stated"),
    "no FLOP/s": (GOOD.replace("bf16 = 165e12", ""), "flops must be stated"),
    "flops as a number": (GOOD.split("[flops]")[0] + "flops = 3e12", "flops must be a table"),
    "an unknown dtype": (GOOD + "int8 = 3e12", "not for 'int8'"),
    "a negative rate": (GOOD.replace("update = 4e10", "update = -4e10"), "update must be a finite number"),
    "an infinite rate": (GOOD.replace("update = 4e10", "update = inf"), "update must be a finite number"),
    "no number": (GOOD.replace("update = 4e10", "update = nan"), "update must be a finite number"),
    "a rate of nothing": (GOOD.replace("update = 4e10", "update = 0"), "update must be a finite number"),
    "a rate that is true": (GOOD.replace("update = 4e10", "update = true"), "update must be a number"),
    "a rate in a list": (GOOD.replace("update = 4e10", "update = [4e10]"), "update must be a number"),
    "a rate in words": (GOOD.replace("update = 4e10", 'update = "fast"'), "update: 'fast' is not a size"),
    "a size that is a list": (GOOD.replace('"64GiB"', "[64]"), "host must be a size"),
    "a size of nothing": (GOOD.replace('"64GiB"', "0"), "a machine has host memory"),
    "a size beyond all": (GOOD.replace('"64GiB"', "9223372036854775808"), "host: the size"),
    "a huge number": (GOOD.replace('"64GiB"', "9" * 4000), "host"),
    "half a link": (GOOD.replace("link_in = 25e9", ""), "needs link_in and link_out"),
    "a disk without speed": (GOOD.replace("disk_write = 3e9", ""), "needs disk_read and disk_write"),
    "a share above one": ("reached = 1.5\n" + GOOD, "reached must be a share"),
    "a share in words": ('reached = "most"\n' + GOOD, "reached must be a number"),
    "a slow operator": ("overhead = 5\n" + GOOD, "overhead must be seconds"),
    "a name of many lines": ('name = "a\\nb"\n' + GOOD, "name must be a line of text"),
    "too much": ("# " + "x" * 70_000, "is larger than"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_bad_file_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    text, said = HOSTILE[case]
    with pytest.raises(UsageError) as caught:
        by_name(str(file(tmp_path, text)))
    message = str(caught.value)
    assert said in message
    assert "box.toml" in message
    assert "\n" not in message
    assert len(message) < 4500 if case == "a huge number" else len(message) < 400


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        by_name(str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="can't be read"):
        read(tmp_path)


def test_an_unknown_name() -> None:
    with pytest.raises(UsageError, match="unknown machine 'abacus': choose from rtx4080"):
        by_name("abacus")


def test_a_precision_without_a_rate() -> None:
    machine = Machine("m", None, 1 << 30, 0, {"fp32": 1e11}, 1.0, 1e10, 1e10, 0, 0, 0, 0, 1e10, 1e-6)
    with pytest.raises(UsageError, match="no FLOP/s for bf16"):
        machine.rate("bf16")
    with pytest.raises(UsageError, match="device size means nothing"):
        machine.sized(device=5)
