"""What replays are set up with, and what is left of their processes."""

import contextlib
import os
import time
from pathlib import Path

from kvtiers.config import OffloadConfig, load_config

WAIT_SECONDS = 60.0


def config(*tiers: dict, **options) -> OffloadConfig:
    """A config in which no request waits for a tier in vain."""
    return load_config(
        {
            "version": 1,
            "primary": {"capacity": "8MiB"},
            "secondary": list(tiers),
            "lookup_wait": "60s",
            "load_wait": "60s",
            "budgets": {"one_tier": "50%"},
            **options,
        }
    )


def descendants(pid: int) -> dict[int, str]:
    """The command lines of all processes that this one has started, by process id, and of those that they have."""
    found: dict[int, str] = {}
    for child in children(pid):
        with contextlib.suppress(OSError):  # it has just ended
            found[child] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        found |= descendants(child)
    return found


def children(pid: int) -> list[int]:
    """The processes that this one has started itself."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found += map(int, (task / "children").read_text().split())
    return found


def named(pid: int, name: str) -> list[int]:
    """The processes below this one whose command line ends with this name."""
    return [child for child, line in descendants(pid).items() if line.rstrip().endswith(name)]


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    return state_of(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether there is such a process, and a signal has stopped it."""
    return state_of(pid) == "T"


def state_of(pid: int) -> str:
    """The kernel's letter for what it does; X, dead, if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_until(what, seconds: float = WAIT_SECONDS) -> None:
    """Wait until ``what()`` is true; AssertionError if it does not become so."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"not within {seconds:g} s (process {os.getpid()})"
        time.sleep(0.01)
