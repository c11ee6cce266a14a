from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import psutil
import pytest
import torch

from outcore.errors import TierError, UsageError
from outcore.memory import host
from outcore.memory.host import PAGE, Region, reserve

MiB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def refill(region: Region, values: torch.Tensor) -> None:
    region.buffer[: values.nbytes] = memoryview(values.view(torch.uint8).numpy()).cast("B")


def test_memory_is_taken_by_touching_and_given_back_by_releasing() -> None:
    region = reserve(64 * MiB)
    before = resident()
    region.tensor.fill_(1)
    assert resident() - before > 60 * MiB
    address = region.tensor.data_ptr()
    region.release()
    assert resident() - before < 4 * MiB
    assert region.tensor.data_ptr() == address
    assert not region.tensor.any()


def test_regions_are_whole_aligned_pages() -> None:
    for asked, given in [(0, PAGE), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)]:
        region = reserve(asked)
        assert region.nbytes == region.tensor.numel() == len(region.buffer) == given
        assert region.tensor.data_ptr() % PAGE == 0
        assert region.tensor.dtype is torch.uint8


def test_far_more_can_be_reserved_than_there_is() -> None:
    region = reserve(1 << 42)
    region.tensor[1 << 41] = 7
    assert region.tensor[1 << 41] == 7


def test_slices_share_memory_and_release_only_their_own() -> None:
    region = reserve(4 * PAGE)
    region.tensor.fill_(3)
    middle = region.slice(PAGE, 2 * PAGE)
    inner = middle.slice(PAGE, 100)
    assert middle.tensor.data_ptr() == region.tensor.data_ptr() + PAGE
    inner.buffer[0] = 9
    assert region.tensor[2 * PAGE] == 9
    inner.release()
    assert not region.tensor[2 * PAGE : 2 * PAGE + 100].any()
    assert (region.tensor[2 * PAGE + 100 :] == 3).all()
    middle.release()
    assert (region.tensor[:PAGE] == 3).all()
    assert not region.tensor[PAGE : 3 * PAGE].any()
    assert (region.tensor[3 * PAGE :] == 3).all()


def test_touching_a_slice_takes_no_more_than_the_slice() -> None:
    region = reserve(64 * MiB)
    size = 2 * MiB + 5 * PAGE
    parts = [region.slice(k * size, size) for k in range(24)]
    before = resident()
    for part in parts[::2]:
        part.tensor.fill_(1)
    assert abs(resident() - before - 12 * size) < MiB
    for part in parts[::2]:
        part.release()
    assert resident() - before < MiB


def test_starts_are_aligned_for_huge_pages_in_a_storage_of_their_own() -> None:
    region = reserve(4 * MiB)
    assert region.tensor.storage_offset() == 0
    assert region.tensor.untyped_storage().nbytes() == 4 * MiB
    if host._HUGE:
        assert region.tensor.data_ptr() % host._HUGE == 0


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(1, PAGE), (-PAGE, PAGE), (0, 3 * PAGE), (2 * PAGE, 1), (0, -1)]
)
def test_slices_outside_or_between_pages(offset: int, nbytes: int) -> None:
    with pytest.raises(UsageError):
        reserve(2 * PAGE).slice(offset, nbytes)


def test_what_cant_be_reserved() -> None:
    with pytest.raises(UsageError):
        reserve(-1)
    with pytest.raises(TierError, match="ulimit"):
        reserve(1 << 60)


def test_views_see_refilled_bytes() -> None:
    region = reserve(MiB)
    values = torch.randn(1000)
    refill(region, values)
    view = region.tensor[:4000].view(torch.float32)
    copy = view.clone()
    region.release()
    assert not view.any()
    refill(region, values)
    assert torch.equal(view, copy)


def test_gradients_are_bit_equal_when_weights_leave_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    values, x = torch.randn(64 * 64), torch.randn(16, 64)

    def gradients(leave: bool) -> tuple[torch.Tensor, torch.Tensor]:
        region = reserve(values.nbytes)
        refill(region, values)
        weight = torch.nn.Parameter(region.tensor[: values.nbytes].view(torch.float32).view(64, 64))
        inputs = x.clone().requires_grad_()
        loss = (torch.nn.functional.linear(inputs, weight).tanh() @ weight).square().sum()
        if leave:
            region.release()
            refill(region, values)
        loss.backward()
        assert weight.grad is not None
        assert inputs.grad is not None
        return weight.grad, inputs.grad

    for stayed, left in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(stayed, left)


@pytest.mark.parametrize("last", ["region", "slice", "tensor", "buffer"])
def test_the_mapping_goes_with_its_last_user(last: str) -> None:
    region = reserve(MiB)
    mapping = weakref.ref(region._mapping)
    keep = {
        "region": region,
        "slice": region.slice(PAGE, PAGE),
        "tensor": region.tensor[5:10],
        "buffer": region.buffer,
    }[last]
    gc.disable()  # without the collector's help
    try:
        del region
        assert mapping() is not None
        del keep
        assert mapping() is None
    finally:
        gc.enable()


def test_nothing_is_said_at_exit() -> None:
    script = (
        "from outcore.memory.host import reserve\n"
        "r = reserve(1 << 20); t = r.tensor[7:]; b = r.buffer; s = r.slice(4096, 4096).tensor\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
