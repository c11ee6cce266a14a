from __future__ import annotations

import numpy as np
import pytest
import torch

from outcore.memory.frames import Framed, Frames
from outcore.memory.host import PAGE

MiB = 1 << 20


def resident(place: Framed) -> int:
    """Bytes of the place's whole frame that have pages, as the system says."""
    count = place.frame_bytes // PAGE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(place.tensor.data_ptr() // PAGE * 8)
        entries = np.frombuffer(file.read(count * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE


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
    assert resident(old) == 64 * MiB
    address = old.tensor.data_ptr()
    new.take_over(old)
    assert resident(new) == 60 * MiB  # not the end, which is not needed
    assert new.tensor.data_ptr() == address
    assert new.tensor.eq(7).all()
    assert old.tensor.data_ptr() != address
    assert resident(old) == 0
    new.release()
    assert resident(new) == 0


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
    place, other = frames.place(nbytes), frames.place(nbytes - PAGE)
    place.tensor.fill_(1)
    assert resident(place) == nbytes
    other.take_over(place)
    other.tensor.fill_(2)
    assert resident(other) == nbytes - PAGE


def test_places_of_other_sizes_of_frame_do_not_mix(frames: Frames) -> None:
    small, large = frames.place(PAGE), frames.place(2 * PAGE)
    assert isinstance(small, Framed)
    assert small.frame_bytes == PAGE
    assert large.frame_bytes == 2 * PAGE
    large.tensor.fill_(1)
    with pytest.raises(AssertionError):
        small.take_over(large)
    assert torch.equal(large.tensor, torch.ones(2 * PAGE, dtype=torch.uint8))
