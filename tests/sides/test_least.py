"""The least that an order of uses must move is that of orders for which it is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.chunks.chunk import Chunk, Kind
from outcore.memory.host import reserve

MiB = 1 << 20


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))


def moved(room: int, *uses: tuple[str, str], links: tuple[str, ...] = ("disk read", "disk write")) -> float:
    """MiB of the least for chunks of one MiB, used one after the other: ``r`` reads, ``w`` reads and writes, ``f``
    overwrites, ``l`` reads for the last time."""
    from sides.least import least
    from sides.uses import Order, Use

    chunks = {name: Chunk(Kind.STATE, name, reserve(MiB)) for name, _ in uses}
    order = Order(room=[room * MiB] * len(uses))
    for at, (name, how) in enumerate(uses):
        order.uses.append(Use(chunks[name], at, at + 1, how != "f", how in "wf", how == "l"))
    found = least(order)
    assert found is not None
    return sum(nbytes for (link, _), nbytes in found.items() if link in links) / MiB


def test_what_fits_stays() -> None:
    assert moved(2, ("a", "w"), ("b", "w")) == pytest.approx(0)


def test_a_scan_by_belady() -> None:
    """With room for k of n chunks (k - 1) / (n - 1) of the uses find theirs."""
    assert moved(2, ("a", "r"), ("b", "r"), ("c", "r")) == pytest.approx(3 * 1 / 2)
    assert moved(3, *((name, "r") for name in "abcde")) == pytest.approx(5 * 2 / 4)


def test_what_changed_is_written_once() -> None:
    """It is read for both uses, and stale on the disk after one."""
    uses = (("a", "w"), ("b", "w"), ("a", "r"), ("b", "r"))
    assert moved(1, *uses, links=("disk read",)) == pytest.approx(4)
    assert moved(1, *uses, links=("disk write",)) == pytest.approx(2)


def test_what_is_worth_nothing_needs_no_room() -> None:
    assert moved(1, ("a", "f"), ("a", "l"), ("b", "f"), ("b", "l")) == pytest.approx(0)
    assert moved(1, ("a", "f"), ("b", "f"), ("a", "l"), ("b", "l")) == pytest.approx(4)
