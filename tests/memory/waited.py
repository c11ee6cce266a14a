"""Transfers that are waited for."""

from __future__ import annotations

from outcore.memory.disk import DiskTier, Extent


def read_now(tier: DiskTier, extent: Extent, into: memoryview) -> None:
    tier.read(extent, into).result()


def write_now(tier: DiskTier, extent: Extent, data: memoryview) -> None:
    tier.write(extent, data).result()
