from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from outcore.errors import BudgetError, SizeError, UsageError
from outcore.memory import limits as found
from outcore.memory.budget import Budget, DiskPath
from outcore.memory.limits import Asked
from outcore.memory.places import available_disk

GiB = 1 << 30


def test_nothing_said_means_what_is_free_less_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found, "available_host", lambda: 100 * GiB)
    monkeypatch.setattr(found, "available_disk", lambda path: 1000 * GiB)
    limits = Budget(disk=tmp_path).limits(50 * GiB)
    assert limits.host == 90 * GiB
    assert limits.device == 50 * GiB - int(0.08 * 50 * GiB)
    assert [(d.path, d.nbytes) for d in limits.disk] == [(str(tmp_path), 950 * GiB)]


def test_small_machines_keep_at_most_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "available_host", lambda: 600 << 20)
    limits = Budget().limits(None)
    assert (limits.device, limits.host, limits.disk) == (None, 300 << 20, ())


def test_what_is_said_is_taken(tmp_path: Path) -> None:
    limits = Budget(device="2GiB", host="64MiB", disk=f"{tmp_path}:3MiB").limits(8 * GiB)
    assert (limits.device, limits.host) == (2 * GiB, 64 << 20)
    assert [(d.path, d.nbytes) for d in limits.disk] == [(str(tmp_path), 3 << 20)]


@pytest.mark.parametrize("make", [str, Path, DiskPath, lambda p: f"{p}:1GiB", lambda p: DiskPath(p, 1 << 30)])
def test_ways_to_name_a_disk(tmp_path: Path, make: Callable[[Path], str]) -> None:
    given = make(tmp_path)
    for disk in (given, [given], (given,)):
        (limit,) = Budget(disk=disk).limits(None).disk
        assert limit.path == str(tmp_path)
        assert limit.nbytes > 0


def test_a_colon_may_be_part_of_a_directory(tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    assert Budget(disk=str(odd)).limits(None).disk[0].path == str(odd)
    assert Budget(disk=f"{odd}:1MiB").limits(None).disk[0].nbytes == 1 << 20
    assert Budget(disk=f"{tmp_path}/a:b/.").limits(None).disk[0].path == str(odd)


def test_directories_on_one_file_system_share_its_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found, "available_disk", lambda path: 101 * GiB)
    for name in "abc":
        (tmp_path / name).mkdir()
    given = [f"{tmp_path}/a:1GiB", f"{tmp_path}/b", f"{tmp_path}/c"]
    assert [d.nbytes for d in Budget(disk=given).limits(None).disk] == [GiB, 95 * GiB // 2, 95 * GiB // 2]
    with pytest.raises(BudgetError):
        Budget(disk=[f"{tmp_path}/a:60GiB", f"{tmp_path}/b:60GiB"]).limits(None)


@pytest.mark.parametrize(
    "given",
    [{"device": "lots"}, {"host": 0}, {"host": "-1GiB"}, {"disk": "/nvme:lots"}, {"disk": "/nvme:"}],
    ids=str,
)
def test_sizes_are_read_at_once(given: dict[str, str]) -> None:
    with pytest.raises(SizeError):
        Budget(**given)


@pytest.mark.parametrize("disk", ["", ":4GiB", 3, [4], [None]], ids=repr)
def test_what_is_not_a_disk_is_refused_at_once(disk: str) -> None:
    with pytest.raises(UsageError, match="/nvme:400GiB"):
        Budget(disk=disk)


def test_disk_path_checks_its_size() -> None:
    with pytest.raises(SizeError):
        DiskPath("/nvme", 0)


def test_directories_that_cant_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name, why in [("none", "No such file"), ("file", "not a directory"), ("link", "symbolic link")]:
        with pytest.raises(UsageError, match=why) as caught:
            Budget(disk=tmp_path / name).limits(None)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(UsageError, match="symbolic link"):
        Budget(disk=f"{tmp_path}/link/").limits(None)
    with pytest.raises(UsageError, match="named twice"):
        Budget(disk=[tmp_path, f"{tmp_path}/."]).limits(None)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(UsageError, match="not writable"):
            Budget(disk=tmp_path).limits(None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a directory away")
def test_directories_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 4321, -1)
    with pytest.raises(UsageError, match="another user"):
        Budget(disk=tmp_path).limits(None)


def test_the_superusers_directories_may_be_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: 4321)
    if owner == 0:
        assert Budget(disk=tmp_path).limits(None).disk
    else:
        with pytest.raises(UsageError, match="another user"):
            Budget(disk=tmp_path).limits(None)


def test_more_than_there_is(tmp_path: Path) -> None:
    free = available_disk(tmp_path)
    with pytest.raises(BudgetError, match="free in") as caught:
        Budget(disk=DiskPath(tmp_path, free + (1 << 40))).limits(None)
    assert caught.value.tier == "disk"
    with pytest.raises(BudgetError, match="machine"):
        Budget(host="4096TiB").limits(None)
    with pytest.raises(BudgetError, match="accelerator"):
        Budget(device="9GiB").limits(8 * GiB)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found, "available_disk", lambda path: 0)
    with pytest.raises(BudgetError, match="nothing is free"):
        Budget(disk=tmp_path).limits(None)


def test_a_device_budget_without_a_device_is_not_ignored() -> None:
    with pytest.raises(UsageError, match="CPU"):
        Budget(device="1GiB").limits(None)


def test_space_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        available_disk(tmp_path / "none")


def test_ranks_of_one_machine_are_held_against_it_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found, "host_capacity", lambda: 10 * GiB)
    monkeypatch.setattr(found, "available_disk", lambda path: 100 * GiB)
    own = Budget(host="4GiB", disk=f"{tmp_path}:40GiB").survey(None)
    other = Budget(host="6GiB", disk=f"{tmp_path}:60GiB").survey(None)
    fits = own.limits(2, Asked.together([own.asked.pack(), other.asked.pack()]))
    assert (fits.host, [disk.nbytes for disk in fits.disk]) == (4 * GiB, [40 * GiB])
    for budget, tier, together in [
        (Budget(host="7GiB"), "host", 11 * GiB),
        (Budget(disk=f"{tmp_path}:61GiB"), "disk", 101 * GiB),
    ]:
        more = budget.survey(None).asked
        with pytest.raises(BudgetError, match="the ranks of this machine ask for") as caught:
            own.limits(2, Asked.together([own.asked.pack(), more.pack()]))
        assert (caught.value.tier, caught.value.needed) == (tier, together)


def test_what_another_rank_asks_for_of_a_disk_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found, "available_disk", lambda path: 101 * GiB)
    other = Budget(disk=f"{tmp_path}:1GiB").survey(None).asked.pack()
    own = Budget(disk=tmp_path).survey(None)
    (limit,) = own.limits(2, Asked.together([own.asked.pack(), other])).disk
    assert limit.nbytes == 95 * GiB // 2
