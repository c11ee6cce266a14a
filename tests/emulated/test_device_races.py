"""The race checker: it finds every planted fault, names both places, and is silent on right programs."""

from __future__ import annotations

import gc
import inspect
import re

import pytest
import torch

pytestmark = pytest.mark.emulated

N = 1024


class Rig:
    """What a streaming library has: compute and two copy streams, pinned buffers, a frame."""

    def __init__(self) -> None:
        self.compute = torch.accelerator.current_stream()
        self.up, self.down = torch.Stream(device="emu"), torch.Stream(device="emu")
        self.host = torch.full((N,), 2.0).pin_memory()
        self.back = torch.zeros(N).pin_memory()
        with self.up:
            self.frame = torch.empty(N, device="emu")

    def fetch(self) -> torch.Event:
        with self.up:
            self.frame.copy_(self.host, non_blocking=True)
            return self.up.record_event()

    def release(self) -> None:
        with self.up:
            self.frame.untyped_storage().resize_(0)

    def refill(self) -> torch.Event:
        with self.up:
            self.frame.untyped_storage().resize_(4 * N)
        return self.fetch()


@pytest.fixture
def rig(emu):
    rig = Rig()
    yield rig
    torch.accelerator.synchronize()


@pytest.fixture
def expect(emu, rig):
    """Expects one race of a kind, raised by the `with` body, and forgets it."""

    def check(kind: str, pattern: str = ""):
        return _Expectation(emu, kind, pattern)

    return check


class _Expectation:
    def __init__(self, emu, kind: str, pattern: str) -> None:
        self.emu, self.kind, self.pattern = emu, kind, pattern

    def __enter__(self) -> _Expectation:
        return self

    def __exit__(self, kind, error, trace) -> bool:
        assert kind is not None, "no race was raised"
        if not issubclass(kind, self.emu.RaceError):
            return False
        races = self.emu.races()
        self.emu.clear_races()
        assert races[0].kind == self.kind, races[0].message
        assert re.search(self.pattern, str(error)), str(error)
        return True


# Planted faults


def test_compute_before_the_copy_is_in(rig, expect):
    rig.fetch()
    with expect("read", "write by stream"):
        rig.frame + 1


def test_the_message_names_both_places(rig, expect):
    rig.fetch()
    line = inspect.currentframe().f_lineno
    here = __file__.rsplit("/", 1)[1]
    now, before = rf"aten::mul at \S*{here}:{line + 4} in ", rf"copy to device at \S*{here}:\d+ in fetch"
    with expect("read", rf"{now}.*\n.*{before}"):
        rig.frame * 2


def test_copy_before_compute_has_read(rig, expect):
    rig.compute.wait_event(rig.fetch())
    rig.frame + 1
    with expect("write", "read by the default stream"):
        rig.fetch()


def test_free_while_compute_still_reads(emu, rig, expect):
    rig.compute.wait_event(rig.fetch())
    rig.frame + 1
    with expect("free", "read by the default stream"):
        rig.release()
        emu.check()


def test_free_of_a_gradient_while_it_is_copied_out(emu, rig, expect):
    gradient = torch.ones(N, device="emu")
    rig.down.wait_stream(rig.compute)
    with rig.down:
        rig.back.copy_(gradient, non_blocking=True)
    with expect("free", r"free on the default stream .* read by stream"):
        del gradient
        emu.check()


def test_free_is_found_at_the_next_launch(rig, expect):
    rig.compute.wait_event(rig.fetch())
    rig.frame + 1
    rig.release()
    with expect("free"):
        torch.zeros(1, device="emu")


def test_copy_out_before_compute_has_written(rig, expect):
    gradient = torch.ones(N, device="emu")
    rig.compute.synchronize()
    gradient.mul_(2)
    with expect("read", "write by the default stream"), rig.down:
        rig.back.copy_(gradient, non_blocking=True)


def test_host_read_before_the_copy_out_is_done(emu, rig, expect):
    rig.compute.wait_event(rig.fetch())
    rig.down.wait_event(rig.fetch())
    with rig.down:
        rig.back.copy_(rig.frame, non_blocking=True)
        left = rig.down.record_event()
    with expect(
        "read", r"read by the host .* pinned host memory .* write by stream .*\n.*test_device_races.py"
    ):
        emu.host_access(rig.back)
    left.synchronize()
    emu.host_access(rig.back)


def test_host_write_into_a_buffer_on_its_way_up(emu, rig, expect):
    emu.configure(h2d_gbps=0.1)
    rig = Rig()
    arrived = rig.fetch()
    with expect("write", "write by the host"):
        emu.host_access(rig.host, write=True)
    arrived.synchronize()
    emu.host_access(rig.host, write=True)


def test_host_watch_sees_ordinary_operators(emu, rig, expect):
    arrived = rig.fetch()
    with emu.host_watch():
        rig.host + 1  # both sides read
        with expect("write", "write by the host"):
            rig.host.zero_()
    arrived.synchronize()
    with emu.host_watch():
        rig.host.zero_()


def test_a_staging_buffer_shared_by_two_streams(rig, expect):
    rig.fetch()
    source = torch.ones(N, device="emu")
    rig.down.wait_stream(rig.compute)
    with expect("write", "pinned host memory .* read by stream"), rig.down:
        rig.host.copy_(source, non_blocking=True)


def test_memory_from_one_stream_used_on_another(rig, expect):
    torch.zeros(1, device="emu")
    frame = torch.empty(N, device="emu")  # may be memory that compute still uses
    with expect("write", "allocation on the default stream"), rig.up:
        frame.copy_(rig.host, non_blocking=True)


def test_read_before_the_refill(rig, expect):
    rig.compute.wait_event(rig.fetch())
    rig.frame + 1
    rig.up.wait_stream(rig.compute)
    rig.release()
    with rig.up:
        rig.frame.untyped_storage().resize_(4 * N)
    rig.compute.wait_stream(rig.up)
    with expect("uninitialised", "which nothing has written since the allocation"):
        rig.frame + 1


def test_in_place_update_of_memory_never_written(expect):
    with expect("uninitialised"):
        torch.empty(8, device="emu").add_(1)


def test_the_wait_comes_before_the_record(rig, expect):
    """An event that was waited for before it was recorded orders nothing."""
    event = torch.Event(device="emu")
    rig.compute.wait_event(event)
    with rig.up:
        rig.frame.copy_(rig.host, non_blocking=True)
        event.record(rig.up)
    with expect("read"):
        rig.frame + 1


def test_an_event_recorded_too_early(rig, expect):
    early = rig.up.record_event()
    rig.fetch()
    rig.compute.wait_event(early)
    with expect("read"):
        rig.frame + 1


def test_a_race_in_backward_names_the_node(rig, expect):
    rig.compute.wait_event(rig.fetch())
    x = torch.ones(N, device="emu", requires_grad=True)
    loss = (x * rig.frame).sum()
    rig.up.wait_stream(rig.compute)
    with torch.autograd._unsafe_preserve_version_counter(rig.frame):
        rig.fetch()
    with expect("read", r"in torch::autograd::generated::MulBackward0"):
        loss.backward()


def test_slices_of_one_block_are_told_apart(rig, expect):
    left, right = rig.frame[: N // 2], rig.frame[N // 2 :]
    with rig.up:
        left.copy_(rig.host[: N // 2], non_blocking=True)
        arrived = rig.up.record_event()
        right.copy_(rig.host[N // 2 :], non_blocking=True)
    rig.compute.wait_event(arrived)
    assert (left + 1).sum().item() == 3 * N / 2
    with expect("read", rf"bytes \[{2 * N}, {4 * N}\)"):
        right + 1


def test_races_can_be_collected(emu):
    emu.configure(raise_races=False)
    rig = Rig()
    rig.fetch()
    rig.frame + 1
    assert [race.kind for race in emu.races()] == ["read"]
    torch.accelerator.synchronize()
    del rig
    emu.clear_races()


def test_the_checker_can_be_off(emu):
    emu.configure(checker=False)
    rig = Rig()
    rig.fetch()
    rig.frame + 1
    assert emu.races() == []


# Right programs


def test_fetch_use_release_refill(rig):
    arrived = rig.fetch()
    for _ in range(3):
        rig.compute.wait_event(arrived)
        assert (rig.frame * 2).sum().item() == 4 * N
        rig.up.wait_event(rig.compute.record_event())
        rig.release()
        arrived = rig.refill()
    rig.compute.wait_event(arrived)


def test_gradient_goes_out_and_is_freed_after_the_host_waited(emu, rig):
    gradient = torch.ones(N, device="emu")
    rig.down.wait_event(rig.compute.record_event())
    with rig.down:
        rig.back.copy_(gradient, non_blocking=True)
        left = rig.down.record_event()
    left.synchronize()
    emu.host_access(rig.back)
    assert rig.back.sum().item() == N
    del gradient
    emu.check()


def test_gradient_is_freed_after_compute_waited(emu, rig):
    gradient = torch.ones(N, device="emu")
    rig.down.wait_stream(rig.compute)
    with rig.down:
        rig.back.copy_(gradient, non_blocking=True)
        left = rig.down.record_event()
    rig.compute.wait_event(left)
    del gradient
    emu.check()


def test_gradient_is_freed_at_once_with_record_stream(emu, rig):
    gradient = torch.ones(N, device="emu")
    rig.down.wait_stream(rig.compute)
    with rig.down:
        rig.back.copy_(gradient, non_blocking=True)
    gradient.record_stream(rig.down)
    del gradient
    emu.check()


def test_order_passes_through_a_third_stream(emu, rig):
    arrived = rig.fetch()
    rig.down.wait_event(arrived)
    rig.compute.wait_event(rig.down.record_event())
    rig.frame + 1
    rig.up.wait_stream(rig.compute)
    emu.check()


def test_reads_on_two_streams_need_no_order(emu, rig):
    arrived = rig.fetch()
    rig.compute.wait_event(arrived)
    rig.down.wait_event(arrived)
    rig.frame + 1
    with rig.down:
        rig.back.copy_(rig.frame, non_blocking=True)
    rig.up.wait_stream(rig.compute)
    rig.up.wait_stream(rig.down)
    emu.check()


def test_a_query_that_succeeds_orders_the_host(emu, rig):
    arrived = rig.fetch()
    while not arrived.query():
        pass
    emu.host_access(rig.host, write=True)
    rig.frame + 1
    rig.up.wait_stream(rig.compute)
    emu.check()


def test_a_device_synchronisation_orders_all(emu, rig):
    rig.fetch()
    torch.accelerator.synchronize()
    rig.frame + 1
    torch.accelerator.synchronize()
    rig.release()
    emu.check()


def stream_training(seed: int) -> torch.Tensor:
    """Two layers streamed through one frame each way, gradients out, update on the host."""
    torch.manual_seed(0)
    compute = torch.accelerator.current_stream()
    up, down = torch.Stream(device="emu"), torch.Stream(device="emu")
    masters = [torch.randn(16, 16).pin_memory() for _ in range(2)]
    grads = [torch.zeros(16, 16).pin_memory() for _ in range(2)]
    with up:
        weights = [torch.empty(16, 16, device="emu") for _ in range(2)]
    for weight in weights:
        weight.requires_grad_()
    for step in range(3):
        torch.manual_seed(10 + step)
        x = torch.randn(4, 16).to("emu")
        for weight, master in zip(weights, masters, strict=True):
            with up, torch.no_grad():
                weight.copy_(master, non_blocking=True)
                arrived = up.record_event()
            compute.wait_event(arrived)
            x = torch.tanh(x @ weight)
        x.sum().backward()
        left = []
        for weight, grad in zip(weights, grads, strict=True):
            down.wait_event(compute.record_event())
            with down:
                grad.copy_(weight.grad, non_blocking=True)
                left.append(down.record_event())
        for event, weight, grad, master in zip(left, weights, grads, masters, strict=True):
            event.synchronize()
            weight.grad = None
            master.sub_(0.1 * grad)
        up.wait_stream(compute)
    return torch.stack([m.clone() for m in masters])


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_random_delays_change_nothing_in_a_right_program(emu):
    expected = stream_training(0)
    for seed in range(20):
        emu.configure(delay_seed=seed, max_delay_ms=1.0)
        with emu.host_watch():
            got = stream_training(seed)
        assert torch.equal(got, expected)
        assert emu.races() == []
    gc.collect()
