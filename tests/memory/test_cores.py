"""Shares of processors on made-up nodes: ranks, quotas, affinities and NUMA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outcore.memory import cores
from outcore.memory.cores import Cores, share


def node(root: Path, online: str, *numa: str) -> Path:
    """A file tree of a node with these processors, and NUMA nodes."""
    base = root / "sys/devices/system"
    (base / "cpu").mkdir(parents=True)
    (base / "cpu/online").write_text(f"{online}\n")
    for number, cpus in enumerate(numa):
        (base / f"node/node{number}").mkdir(parents=True)
        (base / f"node/node{number}/cpulist").write_text(f"{cpus}\n")
    return root


def rank(number: int, ranks: int) -> dict[str, str]:
    return {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(ranks)}


ALL = frozenset(range(16))


def test_one_process_has_the_node(tmp_path: Path) -> None:
    assert share({}, ALL, node(tmp_path, "0-15", "0-7", "8-15")) == Cores(16, ALL, None, 1)


def test_ranks_share_a_node_and_keep_to_a_numa_node_each(tmp_path: Path) -> None:
    root = node(tmp_path, "0-15", "0-3,8-11", "4-7,12-15")
    near, far = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    assert [share(rank(k, 4), ALL, root) for k in range(4)] == [
        Cores(4, near, 0, 4),
        Cores(4, near, 0, 4),
        Cores(4, far, 1, 4),
        Cores(4, far, 1, 4),
    ]


def test_uneven_ranks_divide_their_own_numa_node(tmp_path: Path) -> None:
    root = node(tmp_path, "0-15", "0-7", "8-15")
    assert [share(rank(k, 3), ALL, root).count for k in range(3)] == [4, 4, 8]


def test_fewer_ranks_than_numa_nodes_are_not_confined(tmp_path: Path) -> None:
    root = node(tmp_path, "0-15", "0-3", "4-7", "8-11", "12-15")
    assert share(rank(1, 2), ALL, root) == Cores(8, ALL, None, 2)


def test_what_a_launcher_has_bound_is_not_divided_again(tmp_path: Path) -> None:
    root = node(tmp_path, "0-15", "0-7", "8-15")
    own = frozenset(range(8, 16))
    assert share(rank(1, 2), own, root) == Cores(8, own, 1, 2)


def test_ranks_of_a_container_share_its_processors(tmp_path: Path) -> None:
    root = node(tmp_path, "0-63", "0-63")  # the machine's, as it shows within
    own = frozenset(range(8))
    assert share(rank(1, 4), own, root, launcher=own).count == 2
    assert (
        share(rank(1, 4), own, root, launcher=frozenset(range(32))).count == 8
    )  # bound by whoever started it


def test_an_affinity_narrower_than_the_node_counts(tmp_path: Path) -> None:
    assert share({}, frozenset({2, 3}), node(tmp_path, "0-15", "0-15")).count == 2


@pytest.mark.parametrize(
    ("quota", "ranks", "count"), [("350000 100000", 1, 3), ("350000 100000", 2, 1), ("max 100000", 1, 16)]
)
def test_a_quota_counts(tmp_path: Path, quota: str, ranks: int, count: int) -> None:
    root = node(tmp_path, "0-15", "0-15")
    group = root / "sys/fs/cgroup/a"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a")
    (root / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    assert share(rank(0, ranks), ALL, root).count == count


def test_a_quota_of_the_first_version_counts(tmp_path: Path) -> None:
    root = node(tmp_path, "0-15", "0-15")
    group = root / "sys/fs/cgroup/cpu/a"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1")
    (group / "cpu.cfs_period_us").write_text("100000")
    (group.parent / "cpu.cfs_quota_us").write_text("250000")
    (group.parent / "cpu.cfs_period_us").write_text("100000")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("4:cpu,cpuacct:/a")
    (root / "proc/self/mountinfo").write_text(
        "30 20 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
    )
    assert share({}, ALL, root).count == 2


@pytest.mark.parametrize(("computing", "updating"), [(1, 7), (6, 2), (8, 8), (32, 8)])
def test_updates_take_what_torch_leaves_or_as_many_as_there_are(computing: int, updating: int) -> None:
    assert Cores(8, frozenset(range(8)), None, 1).for_updates(computing) == updating


def test_the_choice_is_said_in_words() -> None:
    assert Cores(4, ALL, 1, 2).describe(1) == (
        "1 to compute (OMP_NUM_THREADS=4 gives it all), 3 to update; 4 processors, of 2 ranks here, on NUMA node 1"
    )


def test_threads_are_bound_only_where_a_process_keeps_to_one_numa_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.append(cpus), raising=False)
    monkeypatch.setattr(cores, "ours", lambda: Cores(8, ALL, None, 1))
    cores.keep_to_node()
    assert bound == []
    monkeypatch.setattr(cores, "ours", lambda: Cores(4, frozenset({4, 5}), 1, 2))
    cores.keep_to_node()
    assert bound == [frozenset({4, 5})]
