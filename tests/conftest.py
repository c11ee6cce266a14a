"""Fixtures shared by all tests."""

import signal

import pytest

import outcore
from emulated import accelerator
from emulated.fixtures import emu
from exact.devices import device
from outcore.planning.prelude import Rehearsing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["device", "emu"]


@pytest.fixture(autouse=True)
def _unrehearsed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal takes a fifth of a second, a run of most tests less: those that are about it ask for it."""
    if request.node.get_closest_marker("rehearsed") is None:
        monkeypatch.setattr(Rehearsing, "before", lambda *arguments: None)


def pytest_configure() -> None:
    outcore.widen_matmuls()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register the emulated device before any test runs: autograd counts devices at its first pass."""
    selected = any(item.get_closest_marker("emulated") for item in session.items)
    if selected and not session.config.option.collectonly:
        accelerator.load()
