from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import SizeError
from outcore.memory.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("14GiB", 14 << 30),
        ("14gib", 14 << 30),
        ("14G", 14 << 30),
        ("14Gi", 14 << 30),
        ("14GB", 14 * 10**9),
        ("512MiB", 512 << 20),
        ("4TB", 4 * 10**12),
        ("1.5 GiB", 3 << 29),
        (" 7 kb ", 7000),
        (".5K", 512),
        ("0.1KiB", 102),
        ("4096", 4096),
        ("1 B", 1),
        ("2 bytes", 2),
        (4096, 4096),
    ],
)
def test_sizes_people_write(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *(0, -1, "0", "0.0GiB", "-1GiB", "", "fourteen", "14 parsecs", "nan", "inf", "1e9", "1,5GiB"),
        *("GiB", "1.2.3G", "9" * 5000, "9999999P", 1 << 63, float("nan"), 1.0, True, None, b"14GiB"),
        *("\u0661\u0664GiB", "14GiB\n14GiB"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_nonsense_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "'14GiB'" in message
    assert "\n" not in message.replace(repr(text), "")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *(
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            ((1 << 30) - 1, "1.0 GiB"),
            (14 << 30, "14.0 GiB"),
        ),
        *((3 << 29, "1.5 GiB"), (-3 << 20, "-3.0 MiB"), (1 << 62, "4096.0 PiB")),
    ],
)
def test_sizes_people_read(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 1 << 62))
def test_what_is_printed_reads_back_to_a_decimal(nbytes: int) -> None:
    back = parse_size(format_size(nbytes))
    assert abs(back - nbytes) <= (0 if nbytes < 1024 else 0.051 * nbytes)


@given(st.integers(1, 1 << 40), st.sampled_from(["KiB", "mib", "M", "kB", "GB"]))
def test_whole_units_are_exact(count: int, unit: str) -> None:
    factor = {"kib": 1 << 10, "mib": 1 << 20, "m": 1 << 20, "kb": 1000, "gb": 10**9}[unit.lower()]
    if count * factor < 1 << 63:
        assert parse_size(f"{count}{unit}") == count * factor
