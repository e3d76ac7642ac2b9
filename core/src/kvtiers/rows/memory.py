"""How much memory this machine, and this container, can still give. Facts for the region and for ``kvtiers check``.

Each function reads below ``root`` (default: the real file system), so that a test can bring a tree of its own, and
answers None where the system does not say.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kvtiers.api.units import format_size
from kvtiers.rows.cgroups import control_groups, read_text

__all__ = ["CgroupMemory", "available_memory", "cgroup_limit", "free_huge_pages", "memory_problem"]

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
    """Bytes that can be taken without swapping: MemAvailable of /proc/meminfo."""
    kibibytes = _fields(read_text(root / "proc/meminfo")).get("MemAvailable")
    return None if kibibytes is None else kibibytes * 1024


def cgroup_limit(root: Path = _ROOT) -> CgroupMemory | None:
    """The tightest memory limit among this process's control groups, version 1 or 2; None: there is no limit."""
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
    """Huge pages of this size that are reserved by the administrator and promised to nobody; None: not supported."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
    try:
        return int(read_text(folder / "free_hugepages")) - int(read_text(folder / "resv_hugepages"))
    except ValueError:
        return None


def memory_problem(nbytes: int, root: Path = _ROOT) -> str | None:
    """Say in one line why ``nbytes`` of memory cannot be had, with what there is and what to do; None if they can."""
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
        f"lower primary.capacity below {format_size(have)}, or make room"
    )
