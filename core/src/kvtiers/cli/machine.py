"""Facts about this machine, read below a root that tests can replace."""

import os
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtiers.region.memfd import HugePages, create_memfd

__all__ = ["Machine"]


def _try_memfd(huge_pages: HugePages) -> None:
    os.close(create_memfd("kvtiers-check", 1 << 30 if huge_pages == "1GiB" else 2 << 20, huge_pages))


@dataclass(frozen=True, slots=True)
class Machine:
    """The source of the machine check's facts. Functions give those that are not files: limits, memfd, memory."""

    root: Path = Path("/")
    system: str = sys.platform
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    try_memfd: Callable[[HugePages], None] = _try_memfd
    sysconf: Callable[[str], int] = os.sysconf

    @property
    def is_linux(self) -> bool:
        """Return whether shared regions, control groups and the rest exist here."""
        return self.system == "linux"

    def read(self, path: str) -> str:
        """Return the text of this file, "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""

    def kernel(self) -> tuple[int, int] | None:
        """Return the kernel's version, the first two numbers of it."""
        match = re.match(r"(\d+)\.(\d+)", self.read("proc/sys/kernel/osrelease"))
        return (int(match[1]), int(match[2])) if match else None

    def numa_nodes(self) -> list[int]:
        """Return the NUMA nodes; none where the kernel does not say."""
        folder = self.root / "sys/devices/system/node"
        return sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*") if path.name[4:].isdecimal())

    def total_memory(self) -> int | None:
        """Return the bytes of memory that are built in, or None."""
        try:
            return self.sysconf("SC_PHYS_PAGES") * self.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
