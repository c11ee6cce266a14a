from __future__ import annotations

from pathlib import Path

import pytest

from outcore.memory import limits
from outcore.memory.cgroup import Headroom, headroom

V2_MOUNT = "31 23 0:28 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
MiB = 1 << 20


class Tree:
    """A machine's ``/proc`` and ``/sys`` on paper."""

    def __init__(self, root: Path, membership: str, mounts: str) -> None:
        self.root = root
        self.write("proc/self/cgroup", membership)
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/root rw\n" + mounts)

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, path: str, limit: str | int, used: int, cache: int = 0, high: str | int = "max") -> None:
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", used)
        stat = f"anon 5\nfile {cache + 7}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}"
        self.write(f"{folder}/memory.stat", stat)

    def v1(self, path: str, limit: int, used: int, cache: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(
            f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0"
        )


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/outer/inner/leaf", V2_MOUNT.format(inside="/"))
    tree.v2("outer", 100 * MiB, 90 * MiB, cache=30 * MiB)
    tree.v2("outer/inner", "max", 80 * MiB)
    tree.v2("outer/inner/leaf", 80 * MiB, 20 * MiB)
    assert headroom(tmp_path) == Headroom(80 * MiB, 40 * MiB)


def test_high_is_a_limit_too(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a", V2_MOUNT.format(inside="/"))
    tree.v2("a", 100 * MiB, 10 * MiB, high=50 * MiB)
    assert headroom(tmp_path) == Headroom(50 * MiB, 40 * MiB)


def test_no_limit_anywhere(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a", V2_MOUNT.format(inside="/"))
    tree.v2("a", "max", 10 * MiB)
    assert headroom(tmp_path) is None


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert headroom(tmp_path) is None


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a", V2_MOUNT.format(inside="/"))
    tree.v2("a", 10 * MiB, 11 * MiB)
    assert headroom(tmp_path) == Headroom(10 * MiB, 0)


@pytest.mark.parametrize("membership", ["4:memory:/job/task", "4:cpu,memory:/job/task\n1:name=systemd:/x"])
def test_version_1_walks_up_and_ignores_huge_numbers(tmp_path: Path, membership: str) -> None:
    tree = Tree(tmp_path, membership, V1_MOUNT.format(inside="/"))
    tree.v1("", (1 << 63) - 4096, 500 * MiB)
    tree.v1("job", 200 * MiB, 150 * MiB, cache=20 * MiB)
    tree.v1("job/task", (1 << 63) - 4096, 100 * MiB)
    assert headroom(tmp_path) == Headroom(200 * MiB, 70 * MiB)


def test_inside_a_container_the_mount_shows_only_the_containers_group(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/docker/abc/sub", V1_MOUNT.format(inside="/docker/abc"))
    tree.v1("", 64 * MiB, 10 * MiB)
    tree.v1("sub", 32 * MiB, 1 * MiB)
    assert headroom(tmp_path) == Headroom(32 * MiB, 31 * MiB)


@pytest.mark.parametrize("membership", ["0::/../../elsewhere", "0::/not/here"])
def test_a_group_that_cant_be_seen_counts_as_the_mount(tmp_path: Path, membership: str) -> None:
    tree = Tree(tmp_path, membership, V2_MOUNT.format(inside="/"))
    tree.v2(".", 64 * MiB, 4 * MiB)
    assert headroom(tmp_path) == Headroom(64 * MiB, 60 * MiB)


def test_both_versions_at_once(tmp_path: Path) -> None:
    mounts = V1_MOUNT.format(inside="/") + V2_MOUNT.format(inside="/").replace(
        "cgroup rw,", "cgroup/unified rw,"
    )
    tree = Tree(tmp_path, "4:memory:/job\n0::/job", mounts)
    tree.v1("job", 64 * MiB, 4 * MiB)
    tree.write("sys/fs/cgroup/unified/job/cgroup.procs", 1)
    assert headroom(tmp_path) == Headroom(64 * MiB, 60 * MiB)


def test_the_machine_and_the_group_together(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/a", V2_MOUNT.format(inside="/"))
    tree.v2("a", 2 * MiB, MiB)
    assert limits.available_host(tmp_path) == MiB
    assert limits.host_capacity(tmp_path) == 2 * MiB
    tree.v2("a", 1 << 55, MiB)
    assert 0 < limits.available_host(tmp_path) <= limits.host_capacity(tmp_path) < 1 << 55


def test_this_machine_answers() -> None:
    assert 0 < limits.available_host() <= limits.host_capacity()
