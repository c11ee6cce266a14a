"""Fixtures shared by all tests."""

from emulated.fixtures import emu

__all__ = ["emu"]
