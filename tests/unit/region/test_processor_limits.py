"""Processors that may be used: those that this thread may run on, and no more than the control groups grant."""

import pytest

from kvtiers.region.limits import usable_processors

TOP = "sys/fs/cgroup"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/cpu rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 processors with these files."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(16)))

    def make(groups, mounts, **files):
        written = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | files
        for path, text in written.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


def test_without_control_groups_it_is_the_affinity(machine, tmp_path):
    assert usable_processors(tmp_path) == 16


@pytest.mark.parametrize(
    ("top", "pod", "count"),
    [
        ("max 100000\n", "max 100000\n", 16),
        ("max 100000\n", "200000 100000\n", 2),
        ("150000 100000\n", "400000 100000\n", 1.5),
        ("max 100000\n", "6400000 100000\n", 16),
        ("", "", 16),
        ("nonsense", "0 0\n", 16),
    ],
)
def test_a_quota_of_version_2_counts_of_the_group_or_one_above_it(machine, top, pod, count):
    root = machine("0::/pod\n", V2, **{f"{TOP}/cpu.max": top, f"{TOP}/pod/cpu.max": pod})
    assert usable_processors(root) == count


@pytest.mark.parametrize(("quota", "count"), [("-1\n", 16), ("250000\n", 2.5)])
def test_a_quota_of_version_1_counts(machine, quota, count):
    folder = f"{TOP}/cpu/docker/abc"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}
    root = machine("4:cpu,cpuacct:/docker/abc\n3:memory:/x\n0::/\n", V1, **files)
    assert usable_processors(root) == count
