"""outcore plan and outcore profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.calling import outcore
from outcore.planning import disk_speed, measure, stopwatch
from outcore.planning.machine_file import read

TINY = ("--model", "gpt2-tiny", "--seq-len", 32, "--batch-size", 2)


def test_tables() -> None:
    done = outcore("plan", *TINY, "--machine", "rtx4090", "--disk", "1TB")
    assert done.exit_code == 0
    for said in (
        "what each tier holds",
        "a step",
        "ZeRO-Infinity, NVMe",
        "tokens/s",
        "least budget",
        "logits",
    ):
        assert said in done.stdout


def test_json() -> None:
    done = outcore("plan", *TINY, "--machine", "h100", "--json", "--activations", "keep", "--ranks", 8)
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["settings"]["activations"] == "keep"
    assert found["ranks"] == 8
    assert {row["strategy"] for row in found["memory_table"]} >= {"ZeRO-3", "outcore"}


def test_slices_can_be_asked_for() -> None:
    done = outcore("plan", *TINY, "--machine", "rtx4090", "--batch-size", 4, "--microbatch", 1, "--json")
    settings = json.loads(done.stdout)["settings"]
    assert (settings["activations"], settings["microbatch"]) == ("recompute", 1)
    done = outcore("plan", *TINY, "--machine", "rtx4090", "--microbatch", 1, "--activations", "keep")
    assert done.exit_code == 2
    assert "microbatch works on recomputed blocks" in done.output + done.stderr


def test_what_does_not_fit_has_its_own_exit_code() -> None:
    arguments = ("plan", *TINY, "--machine", "rtx4090", "--host-memory", "100KiB", "--disk", 0)
    done = outcore(*arguments)
    assert done.exit_code == 3
    assert "the smallest budgets that would do" in done.stderr
    found = json.loads(outcore(*arguments, "--json").stdout)
    assert not found["fits"]
    assert found["needed"] > found["budget"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "no-such-model"), "unknown model"),
        (("--machine", "abacus"), "unknown machine"),
        (("--seq-len", 4096), "has 128 positions"),
        (("--batch-size", 0), "--batch-size must be at least 1"),
        (("--micro-batch", 3), "can't be cut"),
        (("--disk", "1TB", "--disk", "/"), "sizes or directories"),
        (("--optimizer", "newton"), "unknown optimizer"),
        (("--activations", "forget"), "choose from keep, recompute, offload"),
    ],
)
def test_bad_settings(arguments: tuple[object, ...], said: str) -> None:
    done = outcore("plan", *TINY, "--machine", "rtx4090", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "vocab_size": 256,
        "n_positions": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in (tmp_path, tmp_path / "config.json"):
        done = outcore("plan", *TINY, "--model", model, "--machine", "rtx4090", "--json")
        assert json.loads(done.stdout)["model"]["parameters"] == 120_576


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let measurements take no time."""
    monkeypatch.setattr(disk_speed, "DISK_SAMPLE", 8 << 20)
    monkeypatch.setattr(disk_speed, "EXTENT", 1 << 20)
    monkeypatch.setattr(disk_speed, "PASSING", {1 << 16: 4, 1 << 17: 4})
    for module in (disk_speed, stopwatch):
        monkeypatch.setattr(module, "ROUNDS", 1)
        monkeypatch.setattr(module, "SPAN", 0.0)

    def quick(dtype: Any, device: Any) -> float:
        return 1e11

    monkeypatch.setattr(measure, "products", quick)


def test_a_profile_is_measured_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk = tmp_path / "disk"
    disk.mkdir()
    missing = outcore("plan", *TINY)
    assert missing.exit_code == 2
    assert "run outcore profile" in missing.stderr
    done = outcore("profile", "--device", "cpu", "--disk", disk)
    assert done.exit_code == 0
    found = read(tmp_path / "cache" / "outcore" / "machine.toml")
    assert found.date
    assert found.device is None
    assert found.disk_read > 1e6
    assert found.update > 1e6
    assert 0 < found.use < 1
    assert 0 < found.update_turn < 1
    assert 0 <= found.io_turn < 1
    assert 0.1 <= found.slowed <= 1
    assert list(disk.iterdir()) == []
    used = json.loads(outcore("plan", *TINY, "--json").stdout)
    assert used["machine"] == found.name
    assert used["settings"]["budget"]["disk"] == 0
    used = json.loads(outcore("plan", *TINY, "--json", "--disk", f"{disk}:1GiB").stdout)
    assert used["settings"]["budget"]["disk"] == 1 << 30


def test_a_profile_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    (tmp_path / "file").write_text("")
    done = outcore("profile", "--device", "cpu", "--output", tmp_path / "file" / "machine.toml")
    assert done.exit_code == 1
    assert "can't be written" in done.stderr
