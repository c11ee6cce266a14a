"""Fixtures shared by all tests."""

import os
import signal

# Threads of torch's own team don't hold the key to the memory of the emulated device; and two workers share the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from emulated import accelerator
from emulated.fixtures import emu
from exact.devices import device
from outcore.planning.prelude import Rehearsing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The emulated device multiplies as torch does, and so must its reference in host memory, whatever ran before in this
# process, and the commands that tests start.
os.environ["OUTCORE_MATMULS"] = "torch"

__all__ = ["device", "emu"]


@pytest.fixture(autouse=True)
def _unrehearsed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal takes a fifth of a second, a run of most tests less: those that are about it ask for it."""
    if request.node.get_closest_marker("rehearsed") is None:
        monkeypatch.setattr(Rehearsing, "before", lambda *arguments: None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register the emulated device before any test runs: autograd counts devices at its first pass."""
    selected = any(item.get_closest_marker("emulated") for item in session.items)
    if selected and not session.config.option.collectonly:
        accelerator.load()
