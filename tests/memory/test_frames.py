from __future__ import annotations

import psutil
import pytest
import torch

from outcore.memory.frames import Framed, Frames
from outcore.memory.host import PAGE

MiB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def warmed() -> None:
    """What torch takes once, when it first does such things, is not counted."""
    assert torch.zeros(64 * MiB, dtype=torch.uint8).fill_(1).eq(1).all()


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.fixture
def frames() -> Frames:
    return Frames()


def test_a_place_is_zeros_until_written_and_after_each_release(frames: Frames) -> None:
    place = frames.place(3 * PAGE)
    for _ in range(2):
        assert place.tensor.shape == (3 * PAGE,)
        assert len(place.buffer) == 3 * PAGE
        assert not place.tensor.any()
        place.tensor.fill_(7)
        place.release()


def test_pages_go_from_one_to_the_other(frames: Frames) -> None:
    old, new = frames.place(64 * MiB), frames.place(60 * MiB)
    old.tensor.fill_(7)
    before, address = resident(), old.tensor.data_ptr()
    new.take_over(old)
    assert 3 * MiB < before - resident() < 5 * MiB  # the end, which is not needed
    assert new.tensor.data_ptr() == address
    assert new.tensor.eq(7).all()
    assert not old.tensor.any()  # another frame
    assert old.tensor.data_ptr() != address
    new.release()
    assert before - resident() > 60 * MiB


def test_a_smaller_one_leaves_the_rest_to_be_touched(frames: Frames) -> None:
    old, new = frames.place(5 * PAGE), frames.place(8 * PAGE)
    old.tensor.fill_(7)
    new.take_over(old)
    assert new.tensor[: 5 * PAGE].eq(7).all()
    assert not new.tensor[5 * PAGE :].any()


def test_addresses_without_pages_serve_the_next(frames: Frames) -> None:
    first = frames.place(6 * PAGE)
    address = first.tensor.data_ptr()
    first.release()
    assert frames.place(7 * PAGE).tensor.data_ptr() == address


@pytest.mark.parametrize("nbytes", [33 * MiB + PAGE, 64 * MiB, 4 * MiB - PAGE])
def test_no_more_memory_is_taken_than_is_held(frames: Frames, nbytes: int) -> None:
    before = resident()
    place = frames.place(nbytes)
    place.tensor.fill_(1)
    assert resident() - before < nbytes + MiB // 2
    other = frames.place(nbytes - PAGE)
    other.take_over(place)
    other.tensor.fill_(2)
    assert resident() - before < nbytes + MiB // 2
    other.release()


def test_places_of_other_sizes_of_frame_do_not_mix(frames: Frames) -> None:
    small, large = frames.place(PAGE), frames.place(2 * PAGE)
    assert isinstance(small, Framed)
    assert small.frame_bytes == PAGE
    assert large.frame_bytes == 2 * PAGE
    large.tensor.fill_(1)
    with pytest.raises(AssertionError):
        small.take_over(large)
    assert torch.equal(large.tensor, torch.ones(2 * PAGE, dtype=torch.uint8))
