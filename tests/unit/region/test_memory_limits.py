from pathlib import Path

import pytest

from kvtiers.region.limits import available_memory, cgroup_limit, free_huge_pages, memory_problem, oom_kills

MIB = 1 << 20
GIB = 1 << 30


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(str(text))


@pytest.fixture
def machine(tmp_path):
    """A machine with 10 GiB available and no limit; tests add control groups to it."""
    write(
        tmp_path, {"proc/meminfo": f"MemTotal:       33554432 kB\nMemAvailable:   {10 * MIB} kB\nHugePages_Total: 0\n"}
    )
    return tmp_path


def v2(root, group="/kubepods/pod1/engine", mount_root="/", **limits):
    """Control groups of version 2 with these limits by folder ("" is the top)."""
    write(
        root,
        {
            "proc/self/cgroup": f"0::{group}\n",
            "proc/self/mountinfo": (
                "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
                f"41 31 0:38 {mount_root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
            ),
        },
    )
    for folder, files in limits.items():
        path = Path("sys/fs/cgroup") / folder.replace("__", "/")
        write(root, {path / name.replace("_", "."): text for name, text in files.items()})


def v1(root, group="/docker/abc", mount_root="/"):
    write(
        root,
        {
            "proc/self/cgroup": f"9:name=systemd:/x\n4:cpu,memory:{group}\n0::/\n",
            "proc/self/mountinfo": (
                f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory\n"
                "36 31 0:33 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
            ),
        },
    )


def limit_v1(root, folder, limit, usage, cache=0):
    base = Path("sys/fs/cgroup/memory") / folder
    write(
        root,
        {
            base / "memory.limit_in_bytes": limit,
            base / "memory.usage_in_bytes": usage,
            base / "memory.stat": f"cache 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n",
        },
    )


def test_available_memory_is_memavailable_in_bytes(machine):
    assert available_memory(machine) == 10 * GIB


def test_a_system_that_says_nothing_sets_no_limit(tmp_path):
    assert available_memory(tmp_path) is None
    assert cgroup_limit(tmp_path) is None
    assert free_huge_pages(2 * MIB, tmp_path) is None
    assert memory_problem(1 << 60, tmp_path) is None


def test_a_version_2_limit_counts_without_the_file_cache(machine):
    stat = f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\nshmem 7\n"
    v2(
        machine,
        kubepods__pod1__engine={"memory_max": 8 * GIB, "memory_current": 5 * GIB, "memory_stat": stat},
    )
    limit = cgroup_limit(machine)
    assert (limit.limit, limit.used, limit.headroom) == (8 * GIB, 3 * GIB, 5 * GIB)
    assert limit.path == "/sys/fs/cgroup/kubepods/pod1/engine"


def test_the_tightest_of_all_groups_above_is_the_limit(machine):
    v2(
        machine,
        kubepods__pod1__engine={"memory_max": "max", "memory_current": GIB},
        kubepods__pod1={"memory_max": 4 * GIB, "memory_current": 3 * GIB},
        kubepods={"memory_max": 100 * GIB, "memory_current": 98 * GIB},
    )
    assert cgroup_limit(machine).path == "/sys/fs/cgroup/kubepods/pod1"
    assert cgroup_limit(machine).headroom == GIB


def test_a_throttling_limit_counts_like_a_hard_one(machine):
    v2(machine, kubepods__pod1__engine={"memory_max": 8 * GIB, "memory_high": 2 * GIB, "memory_current": GIB})
    assert cgroup_limit(machine).headroom == GIB


def test_no_limit_anywhere_is_none(machine):
    v2(machine, kubepods={"memory_max": "max", "memory_current": GIB})
    assert cgroup_limit(machine) is None


def test_a_container_that_sees_its_own_group_as_the_top_finds_its_limit(machine):
    v2(machine, group="/", **{"": {"memory_max": 6 * GIB, "memory_current": GIB}})
    assert cgroup_limit(machine).headroom == 5 * GIB


@pytest.mark.parametrize("mount_root", ["/", "/docker/abc"])
def test_a_version_1_limit_is_found_in_the_group_or_where_a_container_mounts_it(machine, mount_root):
    v1(machine, mount_root=mount_root)
    limit_v1(machine, "" if mount_root != "/" else "docker/abc", 6 * GIB, 3 * GIB, cache=GIB)
    assert cgroup_limit(machine).headroom == 4 * GIB


def test_a_container_that_sees_the_hosts_path_finds_its_limit_at_the_mount(machine):
    v1(machine, group="/docker/abc", mount_root="/")
    limit_v1(machine, "", 2 * GIB, GIB)  # the folder docker/abc does not exist in here
    assert cgroup_limit(machine).headroom == GIB


def test_version_1_unlimited_is_no_limit(machine):
    v1(machine)
    limit_v1(machine, "docker/abc", 9223372036854771712, GIB)
    assert cgroup_limit(machine) is None


def test_use_beyond_the_limit_leaves_nothing(machine):
    v1(machine)
    limit_v1(machine, "docker/abc", GIB, 2 * GIB)
    assert cgroup_limit(machine).headroom == 0


def test_what_fits_is_no_problem(machine):
    assert memory_problem(10 * GIB, machine) is None


def test_too_little_memory_names_both_numbers_and_the_way_out(machine):
    assert memory_problem(11 * GIB, machine) == (
        "11GiB of memory are wanted, but the machine has 10GiB available; "
        "lower primary.capacity below 10GiB, or make room"
    )


def test_a_group_that_is_too_small_is_named_with_its_limit(machine):
    v1(machine)
    limit_v1(machine, "docker/abc", 4 * GIB, GIB)
    assert memory_problem(5 * GIB, machine) == (
        "5GiB of memory are wanted, but the machine has 10GiB available and the control group "
        "/sys/fs/cgroup/memory/docker/abc 3GiB (limit 4GiB, 1GiB in use); "
        "lower primary.capacity below 3GiB, or make room"
    )


def test_free_huge_pages_are_those_without_a_reservation(tmp_path):
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    write(tmp_path, {f"{folder}/free_hugepages": "12\n", f"{folder}/resv_hugepages": "5\n"})
    assert free_huge_pages(2 * MIB, tmp_path) == 7


def test_this_machine_has_memory():
    assert available_memory() > 0


def test_processes_that_the_kernel_killed_for_want_of_memory_are_counted(tmp_path):
    assert oom_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("drop_pagecache 0\noom_kill 3\nballoon_inflate 7\n")
    assert oom_kills(tmp_path) == 3
