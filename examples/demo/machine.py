"""The machine's view of an engine: its processes, and which of them map its memory."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Process", "children", "holders", "host_of", "is_alive", "wait_until"]


class Process(NamedTuple):
    """A process. ``started`` distinguishes it from a later one of the same id."""

    pid: int
    started: int
    name: str


def children(pid: int) -> list[Process]:
    """Return the processes that this one has started, and those that they have."""
    processes = list(_processes())
    found = [process for parent, process in processes if parent == pid]
    for one in found:  # grows while it is walked
        found += [process for parent, process in processes if parent == one.pid]
    return found


def host_of(pid: int, tier: str) -> Process | None:
    """Return the tier's host, one of this engine's children: its name is the last word of its command line."""
    return next((process for process in children(pid) if process.name == tier), None)


def is_alive(process: Process) -> bool:
    """Say whether it still runs; one that has ended and was not waited for does not."""
    about = _stat(process.pid)
    return about is not None and about[2] == process.started and about[0] != "Z"


def holders(engine_id: str) -> list[int]:
    """Return the processes that have the engine's memory, mapped or as an open file."""
    memory = f"memfd:kvtiers-{engine_id}"
    return [pid for pid in _pids() if any(memory in line for line in _maps_and_files(pid))]


def wait_until(what: Callable[[], bool], seconds: float) -> bool:
    """Wait for something, so long at most; say whether it came."""
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _processes() -> Iterator[tuple[int, Process]]:
    for pid in _pids():
        about = _stat(pid)
        if about is not None:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                yield about[1], Process(pid, about[2], words[-1].decode(errors="replace"))


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, parent and start time."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def _maps_and_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
        yield from Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(link.readlink())
