"""Processor time and memory of processes, as the kernel counts them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def children() -> list[int]:
    """Return the process ids of this process's children."""
    return [int(pid) for text in _of_threads("self", "children") for pid in text.split()]


def tier_hosts() -> list[int]:
    """Return the process ids of this process's tier hosts."""
    return [pid for pid in children() if b"kvtiers.host.__main__" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, to the nanosecond."""
    return sum(int(text.split()[0]) for text in _of_threads(pid, "schedstat")) / 1e9


def _of_threads(process: int | str, name: str) -> Iterator[str]:
    """Read the kernel's file of this name for each thread of a process that does not end meanwhile."""
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield (task / name).read_text()


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
