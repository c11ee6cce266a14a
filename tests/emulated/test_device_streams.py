"""Streams, events and copies: order, asynchrony, throttling, lifetimes."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytestmark = pytest.mark.emulated

MIB = 1 << 20


def pinned(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value).pin_memory()


def test_current_stream_is_scoped_and_per_thread(emu):
    side = torch.Stream(device="emu")
    default = torch.accelerator.current_stream()
    with side:
        assert torch.accelerator.current_stream() == side
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert seen == [default]
    assert torch.accelerator.current_stream() == default
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream() == side
    torch.accelerator.set_stream(default)


def test_a_copy_returns_before_it_is_complete(emu):
    emu.configure(h2d_gbps=0.02, d2h_gbps=0.02)  # 50 ms per MB
    host, side = pinned(MIB), torch.Stream(device="emu")
    with side:
        device = torch.empty(MIB, device="emu")
        device.copy_(host, non_blocking=True)
        arrived = side.record_event()
        assert not arrived.query()
        assert not side.query()
    torch.accelerator.current_stream().wait_event(arrived)  # does not block the host
    assert not arrived.query()
    assert device.sum().item() == MIB  # the kernel waits for the event, and .item() for the kernel
    assert arrived.query()
    with side:
        back = torch.zeros(MIB).pin_memory()
        back.copy_(device, non_blocking=True)
        left = side.record_event()
    assert not left.query()
    left.synchronize()
    assert left.query()
    assert back.sum().item() == MIB


def test_who_does_not_wait_gets_the_old_bytes(emu):
    """Asynchrony is real: without the checker, a read too early sees poison, a free too early loses data."""
    emu.configure(checker=False, h2d_gbps=0.02, d2h_gbps=0.02)
    side = torch.Stream(device="emu")
    with side:
        device = torch.empty(MIB, device="emu").copy_(pinned(MIB), non_blocking=True)
    assert device.isnan().all().item()
    side.synchronize()
    assert device.sum().item() == MIB
    source, back = torch.ones(MIB, device="emu"), torch.zeros(MIB).pin_memory()
    with side:
        back.copy_(source, non_blocking=True)
    assert back.isnan().all()  # the target is poisoned when the copy is asked for
    del source
    side.synchronize()
    assert back.isnan().all()


def test_a_target_that_an_earlier_copy_reads_is_left_alone(emu):
    emu.configure(h2d_gbps=0.05)
    side = torch.Stream(device="emu")
    buffer, source = pinned(MIB, 4.0), torch.ones(MIB, device="emu")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        device = torch.empty(MIB, device="emu").copy_(buffer, non_blocking=True)
        buffer.copy_(source, non_blocking=True)
    side.synchronize()
    assert device.sum().item() == 4 * MIB
    assert buffer.sum().item() == MIB


def test_to_the_host_without_blocking_is_pinned_and_late(emu):
    emu.configure(d2h_gbps=0.02)
    host = torch.ones(MIB, device="emu").to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert not torch.accelerator.current_stream().query()
    torch.accelerator.synchronize()
    emu.host_access(host)
    assert host.sum().item() == MIB


def test_a_blocking_copy_and_a_pageable_one_wait(emu):
    emu.configure(h2d_gbps=0.1)
    for host, non_blocking in ((pinned(MIB), False), (torch.ones(MIB), True)):
        start = time.monotonic()
        device = torch.empty(MIB, device="emu").copy_(host, non_blocking=non_blocking)
        assert time.monotonic() - start >= 4 * MIB / 0.1e9
        assert torch.accelerator.current_stream().query()
        assert device.sum().item() == MIB


@pytest.mark.parametrize("streams", [1, 2])
def test_one_direction_is_one_link(emu, streams):
    """Two copies one way take the time of their sum, on one stream or on two."""
    emu.configure(h2d_gbps=0.1)
    hosts = [pinned(MIB) for _ in range(2)]
    sides = [torch.Stream(device="emu") for _ in range(streams)]
    start = time.monotonic()
    kept = []
    for i, host in enumerate(hosts):
        with sides[i % streams]:
            kept.append(torch.empty(MIB, device="emu").copy_(host, non_blocking=True))
    torch.accelerator.synchronize()
    assert time.monotonic() - start >= 2 * 4 * MIB / 0.1e9


def test_the_two_directions_overlap(emu):
    emu.configure(h2d_gbps=0.02, d2h_gbps=0.02)
    up, down = torch.Stream(device="emu"), torch.Stream(device="emu")
    host, back = pinned(MIB), pinned(MIB)
    source = torch.ones(MIB, device="emu")
    ready = torch.accelerator.current_stream().record_event()
    start, middle, end = (torch.Event(device="emu", enable_timing=True) for _ in range(3))
    start.record(up)
    with up:
        target = torch.empty(MIB, device="emu").copy_(host, non_blocking=True)
    middle.record(up)
    with down:
        down.wait_event(ready)
        back.copy_(source, non_blocking=True)
    end.record(down)
    torch.accelerator.synchronize()
    single = 4 * MIB / 0.02e9 * 1e3
    assert start.elapsed_time(middle) >= 0.99 * single
    assert start.elapsed_time(end) < 1.8 * single
    assert target.sum().item() == MIB


def test_copies_and_python_run_at_once(emu):
    """While one thread waits for a copy, another one runs Python: the GIL is released."""
    emu.configure(h2d_gbps=0.02)
    host, side = pinned(MIB), torch.Stream(device="emu")
    with side:
        device = torch.empty(MIB, device="emu").copy_(host, non_blocking=True)
        arrived = side.record_event()
    order = []
    started = threading.Event()

    def count() -> None:
        started.wait()
        order.append("python")

    thread = threading.Thread(target=count)
    thread.start()
    started.set()
    arrived.synchronize()
    order.append("copy")
    thread.join()
    assert order == ["python", "copy"]
    assert device.sum().item() == MIB


def test_events_can_be_recorded_again(emu):
    emu.configure(h2d_gbps=0.05)
    host, side = pinned(MIB), torch.Stream(device="emu")
    event = torch.Event(device="emu")
    assert event.query()
    with side:
        first = torch.empty(MIB, device="emu").copy_(host, non_blocking=True)
        event.record(side)
        second = torch.empty(MIB, device="emu").copy_(host, non_blocking=True)
        event.record(side)
    assert not event.query()
    event.wait(torch.accelerator.current_stream())
    assert (first + second).sum().item() == 2 * MIB


def test_wait_stream_and_synchronize_order_work(emu):
    emu.configure(h2d_gbps=0.1)
    host, side = pinned(MIB), torch.Stream(device="emu")
    with side:
        device = torch.empty(MIB, device="emu").copy_(host, non_blocking=True)
    torch.accelerator.current_stream().wait_stream(side)
    assert device.sum().item() == MIB
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        device.copy_(pinned(MIB, 2.0), non_blocking=True)
    side.synchronize()
    assert device.sum().item() == 2 * MIB


def test_pinned_memory_outlives_its_copy(emu):
    emu.configure(h2d_gbps=0.05)
    side = torch.Stream(device="emu")
    with side:
        device = torch.empty(MIB, device="emu").copy_(pinned(MIB, 5.0), non_blocking=True)
    other = [pinned(MIB, 0.0) for _ in range(3)]
    torch.accelerator.current_stream().wait_stream(side)
    assert device.sum().item() == 5 * MIB
    assert len(other) == 3


def test_record_stream_keeps_a_freed_block(emu):
    emu.configure(d2h_gbps=0.05)
    side = torch.Stream(device="emu")
    source = torch.full((MIB,), 3.0, device="emu")
    address = source.data_ptr()
    back = torch.zeros(MIB).pin_memory()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        back.copy_(source, non_blocking=True)
    source.record_stream(side)
    live = torch.accelerator.memory_allocated()
    del source
    assert torch.accelerator.memory_allocated() == live - 4 * MIB
    stats = torch.accelerator.memory_stats()
    assert stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"] == 4 * MIB
    other = torch.zeros(MIB, device="emu")
    assert other.data_ptr() != address
    side.synchronize()
    assert back.sum().item() == 3 * MIB
    assert torch.empty(MIB, device="emu").data_ptr() == address


def test_a_full_device_waits_for_recorded_streams(emu):
    emu.configure(capacity=torch.accelerator.memory_allocated() + 4 * MIB + 4, d2h_gbps=0.1)
    side = torch.Stream(device="emu")
    source = torch.full((MIB,), 3.0, device="emu")
    back = torch.zeros(MIB).pin_memory()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        back.copy_(source, non_blocking=True)
    source.record_stream(side)
    del source
    again = torch.zeros(MIB, device="emu")  # fits once the copy is over
    assert side.query()
    assert back.sum().item() == 3 * MIB
    assert again.sum().item() == 0


def test_free_lists_belong_to_streams(emu):
    side = torch.Stream(device="emu")
    with side:
        x = torch.empty(MIB, device="emu")
    address = x.data_ptr()
    del x
    assert torch.empty(MIB, device="emu").data_ptr() != address
    with side:
        assert torch.empty(MIB, device="emu").data_ptr() == address


def test_delays_are_seeded(emu):
    def delays(seed: int) -> list[float]:
        emu.configure(delay_seed=seed, max_delay_ms=20)
        return [emu.copy_delay_ms(number) for number in range(4)]

    first = delays(1)
    assert first == delays(1)
    assert first != delays(2)
    assert all(0 <= delay <= 20 for delay in first)
    host, device = pinned(8), torch.empty(8, device="emu")
    start = time.monotonic()
    for _ in range(4):
        device.copy_(host)
    assert emu.copies_made() == 4
    assert time.monotonic() - start >= sum(delays(2)) / 1e3


def test_one_copy_is_late(emu):
    emu.configure(delay_seed=5, max_delay_ms=200, delay_copy=1)
    side = torch.Stream(device="emu")
    host, events, kept = pinned(8), [], []
    with side:
        for _ in range(2):
            kept.append(torch.empty(8, device="emu").copy_(host, non_blocking=True))
            events.append(side.record_event())
    events[0].synchronize()
    assert not events[1].query()
    events[1].synchronize()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_backward_follows_the_forward_streams(emu):
    side = torch.Stream(device="emu")
    x = torch.randn(8, 8).to("emu").requires_grad_()
    w = torch.randn(8, 8).to("emu").requires_grad_()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = (x @ w).relu()
    torch.accelerator.current_stream().wait_stream(side)
    (y * x).sum().backward()
    xc, wc = x.detach().cpu().requires_grad_(), w.detach().cpu().requires_grad_()
    ((xc @ wc).relu() * xc).sum().backward()
    assert torch.equal(x.grad.cpu(), xc.grad)
    assert torch.equal(w.grad.cpu(), wc.grad)


def test_a_copied_stream_of_blocks_computes_the_right_sum(emu):
    """Prefetch in a ring of two frames, with events both ways."""
    emu.configure(h2d_gbps=2.0, delay_seed=3, max_delay_ms=3)
    compute, up = torch.accelerator.current_stream(), torch.Stream(device="emu")
    blocks = [pinned(1024, float(i)) for i in range(8)]
    with up:
        frames = [torch.empty(0, device="emu") for _ in range(2)]
    used: list[torch.Event | None] = [None, None]
    total = torch.zeros(1024, device="emu")
    for i, block in enumerate(blocks):
        frame = frames[i % 2]
        with up:
            if used[i % 2] is not None:
                up.wait_event(used[i % 2])
            frame.untyped_storage().resize_(0)
            frame.untyped_storage().resize_(4096)
            frame.set_(frame.untyped_storage(), 0, (1024,), (1,))
            frame.copy_(block, non_blocking=True)
            arrived = up.record_event()
        compute.wait_event(arrived)
        total += frame
        used[i % 2] = compute.record_event()
    assert total.tolist() == [28.0] * 1024
    with up:
        up.wait_stream(compute)
        del frame
        frames.clear()
