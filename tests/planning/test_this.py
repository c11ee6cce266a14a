"""This machine: the sizes that it has now, on the device of its profile or on the one that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outcore.errors import UsageError
from outcore.memory.device import find, free_bytes
from outcore.planning.machine import Machine
from outcore.planning.machine_file import write
from outcore.planning.this import profile_path, this
from planning.accuracy import CPU, EMU


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def profile(machine: Machine) -> None:
    profile_path().parent.mkdir(exist_ok=True)
    profile_path().write_text(write(machine))


@pytest.mark.emulated
def test_the_profile_says_what_computes(emu: ModuleType) -> None:
    profile(CPU)
    assert this().device is None
    for name in ("box, emu:0", "the box under the desk", "box, cuda:7"):
        profile(replace(EMU, name=name))
        assert this().device == free_bytes(find("emu"))


@pytest.mark.emulated
def test_a_profile_of_another_device_is_refused(emu: ModuleType) -> None:
    profile(CPU)
    with pytest.raises(UsageError, match="run outcore profile --device emu again"):
        this(device=find("emu"))
    profile(EMU)
    with pytest.raises(UsageError, match="run outcore profile --device cpu again"):
        this(device=torch.device("cpu"))


def test_a_profile_of_a_device_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(name: str | None) -> torch.device:
        if name is not None:
            raise UsageError("there is no such device here")
        return torch.device("cpu")

    monkeypatch.setattr("outcore.planning.this.find", alone)
    profile(replace(EMU, name="box, cuda:0"))
    with pytest.raises(UsageError, match="of another device"):
        this()
