"""What processes take, as the kernel counts it."""

from pathlib import Path


def children() -> list[int]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def private_mb(pid: int) -> float:
    """Return the memory (10^6 bytes) that a process has for itself, without its part of the shared region."""
    kibibytes, in_region = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            in_region = "memfd:kvtiers" in line
        elif words[0] in {"Private_Clean:", "Private_Dirty:"} and not in_region:
            kibibytes += int(words[1])
    return kibibytes * 1024 / 1e6
