"""The same on a device: copies and kernels are timed by its streams, in the host's time."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from recorded import UNITS, offloaded

import outcore
from outcore.report.shares import fillings, uses
from outcore.report.timeline import Record
from outcore.report.tracer import timeline_of

pytestmark = pytest.mark.emulated


def recorded(disk: Path) -> tuple[Record, dict[str, int]]:
    """The second step, and the bytes that it moved."""
    model, optimizer = offloaded(disk, host="16MiB", device="emu", device_memory="1600KiB")
    timeline = timeline_of(model)
    ids = torch.randn(16, 64).to("emu")
    for number in (1, 2):
        before = outcore.snapshot(model)
        with timeline.step(number):
            model(ids).float().square().mean().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        after = outcore.snapshot(model)
    outcore.release(model)
    return timeline.records[-1], {link: n - before.moved[link] for link, n in after.moved.items()}


def test_links_and_kernels_are_timed_by_the_device(emu: ModuleType, tmp_path: Path) -> None:
    emu.configure(h2d_gbps=0.01, d2h_gbps=0.01)
    record, moved = recorded(tmp_path)
    found = uses(record)
    assert record.exact
    for link in ("device in", "device out"):
        assert found[link].nbytes == moved[link] > 0
        least = moved[link] / 0.01e9  # a busy machine adds to it
        assert 0.95 * least < found[link].seconds < 1.5 * least
    for track in ("forward", "backward"):
        assert {span.name for span in record.spans if span.track == track} == UNITS
    assert all(record.start - 0.01 <= s.start <= s.stop <= record.stop + 0.5 for s in record.spans)


def test_kernels_wait_for_a_slow_link_and_that_is_seen(emu: ModuleType, tmp_path: Path) -> None:
    emu.configure(h2d_gbps=0.02)
    record, _ = recorded(tmp_path)
    stalls = [span for span in record.spans if span.track == "device waiting"]
    assert {span.name for span in stalls} == {"device in"}
    assert sum(span.seconds for span in stalls) > 0.1 * record.seconds


def test_both_tiers_are_shown(emu: ModuleType, tmp_path: Path) -> None:
    record, _ = recorded(tmp_path)
    device, host = fillings(record, 10_000)[:2]
    assert (device.tier, host.tier) == ("device", "host")
    assert device.budget == 1600 << 10
    assert 0 < device.peak.total <= device.budget
    assert {"parameters", "gradients", "activations"} <= set(device.kinds)
