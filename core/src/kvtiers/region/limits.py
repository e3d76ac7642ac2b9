"""The machine's limits for this process: memory, huge pages and processors, within its control groups.

Control groups of version 1 and 2 are read as folders below ``root``, so that a test can bring a tree of its own.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtiers.api.units import format_size

__all__ = [
    "CgroupMemory",
    "available_memory",
    "cgroup_limit",
    "free_huge_pages",
    "memory_problem",
    "oom_kills",
    "read_text",
    "usable_processors",
]

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The memory limit that binds this process: the control group that has the least left.

    ``used`` leaves out the file cache, which the kernel gives back before it fails an allocation.
    """

    path: str
    limit: int
    used: int

    @property
    def headroom(self) -> int:
        """Bytes that can still be taken."""
        return max(0, self.limit - self.used)


def _fields(text: str) -> dict[str, int]:
    numbers = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdecimal():
            numbers[words[0]] = int(words[1])
    return numbers


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes that can be taken without swapping: MemAvailable of /proc/meminfo."""
    kibibytes = _fields(read_text(root / "proc/meminfo")).get("MemAvailable")
    return None if kibibytes is None else kibibytes * 1024


def cgroup_limit(root: Path = _ROOT) -> CgroupMemory | None:
    """Return the tightest memory limit among this process's control groups, version 1 or 2; None: there is no limit."""
    found = [
        limit
        for folder, version in control_groups("memory", root)
        if (limit := _limit_of(folder, version, root)) is not None
    ]
    return min(found, key=lambda limit: limit.headroom, default=None)


def _limit_of(folder: Path, version: int, root: Path) -> CgroupMemory | None:
    # memory.high does not kill but throttles every allocation above it, which stalls an engine as surely.
    limit_files = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    limits = []
    for name in limit_files:
        with contextlib.suppress(ValueError):  # "max", or no such file
            limits.append(int(read_text(folder / name)))
    if not limits or min(limits) >= _UNLIMITED:
        return None
    try:
        used = int(read_text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")))
    except ValueError:
        return None
    stat = _fields(read_text(folder / "memory.stat"))
    prefix = "" if version == 2 else "total_"
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return CgroupMemory(f"/{folder.relative_to(root)}", min(limits), max(0, used - cache))


def free_huge_pages(page_bytes: int, root: Path = _ROOT) -> int | None:
    """Huge pages of this size that the administrator reserved and that are still free; None: not supported."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
    try:
        return int(read_text(folder / "free_hugepages")) - int(read_text(folder / "resv_hugepages"))
    except ValueError:
        return None


def memory_problem(nbytes: int, root: Path = _ROOT, option: str = "primary.capacity") -> str | None:
    """Explain in one line why ``nbytes`` of memory cannot be had, and what to do; None if they can.

    ``option``: where their number stands.
    """
    available, cgroup = available_memory(root), cgroup_limit(root)
    have = min(available if available is not None else nbytes, cgroup.headroom if cgroup else nbytes)
    if nbytes <= have:
        return None
    facts = []
    if available is not None:
        facts.append(f"the machine has {format_size(available)} available")
    if cgroup is not None:
        facts.append(
            f"the control group {cgroup.path} {format_size(cgroup.headroom)} "
            f"(limit {format_size(cgroup.limit)}, {format_size(cgroup.used)} in use)"
        )
    return (
        f"{format_size(nbytes)} of memory are wanted, but {' and '.join(facts)}; "
        f"lower {option} below {format_size(have)}, or make room"
    )


def oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed for want of memory, the machine's or a control group's."""
    return _fields(read_text(root / "proc/vmstat")).get("oom_kill", 0)


def usable_processors(root: Path = _ROOT) -> float:
    """Return the processors of this thread's affinity, or fewer where a control group grants only so much time."""
    grants = [grant for folder, version in control_groups("cpu", root) if (grant := _grant(folder, version)) > 0]
    return min([len(os.sched_getaffinity(0)), *grants])


def _grant(folder: Path, version: int) -> float:
    """Return processor seconds a second that a control group grants; 0.0: as many as there are."""
    if version == 2:
        words = read_text(folder / "cpu.max").split()
    else:
        words = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    with contextlib.suppress(ValueError):  # "max", or no such file
        quota, period = map(int, words)
        return quota / period if period > 0 else 0.0
    return 0.0


def read_text(path: Path) -> str:
    """Return what a file of the system says; "" if there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield this process's groups of a controller and all groups above them, as folders, with their version.

    Reads below ``root``, so that a test can bring a tree of its own. A group limits those below it, too.
    """
    groups = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            groups[2] = path
        elif controller in controllers.split(","):
            groups[1] = path
    for version, mount_root, mount_point in _mounts(controller, root):
        if version not in groups:
            continue
        top = root / mount_point.lstrip("/")
        inner = groups[version]
        if mount_root != "/":  # a container sees its own group as the top, but /proc may show the host's path
            inner = inner[len(mount_root) :] if inner.startswith(mount_root) else "/"
        folder = top / inner.strip("/")
        yield from ((above, version) for above in (folder, *folder.parents) if above.is_relative_to(top))


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, str]]:
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, types = mount.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        if types[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif types[0] == "cgroup" and controller in types[2].split(","):
            yield 1, fields[3], fields[4]
