"""pytest fixtures of the emulated accelerator, for any test directory to import in its conftest."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from . import accelerator


@pytest.fixture
def emu() -> Iterator[ModuleType]:
    """The emulated accelerator, freshly configured; the test fails if it leaves a race behind."""
    accelerator.configure()
    yield accelerator
    races = accelerator.races()
    accelerator.reset()
    assert not races, "\n\n".join(race.message for race in races)
