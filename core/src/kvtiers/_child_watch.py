"""The watch over child processes that a plugin starts: which of its calls started one, and which are still there.

For ``kvtiers check`` and the conformance kit. Python reports to an audit hook that a thread is about to start a
process; the frames of that thread say by which method of the plugin.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from kvtiers._failures import FORKED_STATUS

__all__ = ["ChildWatch", "came_back", "children", "end_children"]

_EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})
_SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""What Python itself starts once, and ends with this process."""
_PAUSE_SECONDS = 0.01


def children() -> set[int]:
    """Return the ids of this process's children, those that have ended and are not reaped included; Linux only."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has just ended
                found.update(map(int, (task / "children").read_text().split()))
    return found


class ChildWatch:
    """Watches from its making on, until ``left`` has been called. One at a time."""

    _now: ClassVar["ChildWatch | None"] = None
    _is_hooked: ClassVar[bool] = False

    def __init__(self) -> None:
        self._before = children()
        self._starts: list[tuple[list[tuple[str, type]], set[int]]] = []
        self._lock = threading.Lock()
        if not ChildWatch._is_hooked:  # a hook stays for the life of the process
            ChildWatch._is_hooked = True
            sys.addaudithook(_on_event)
        ChildWatch._now = self

    def note(self, frame: FrameType) -> None:
        """Keep what is being called where a process is about to be started."""
        calls: list[tuple[str, type]] = []
        place: FrameType | None = frame
        while place is not None:
            calls.append((place.f_code.co_name, type(place.f_locals.get("self"))))
            place = place.f_back
        before = children()
        with self._lock:
            self._starts.append((calls, before))

    def left(self, plugin: object, patience: float) -> dict[int, str]:
        """Return by its id each child that is there after ``patience`` seconds, with what ``plugin`` did to start it.

        As ``CLASS.method``, the class alone where none of its methods was being called. Ends the watch.
        """
        until = time.monotonic() + patience
        while (left := self._fresh()) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
        ChildWatch._now = None
        return {pid: self._starter(pid, type(plugin)) for pid in sorted(left)}

    def _fresh(self) -> set[int]:
        return {pid for pid in children() - self._before if not any(word in _command(pid) for word in _SHARED)}

    def _starter(self, pid: int, plugin: type) -> str:
        """Return the method by whose start the child came: the last one before which it was not there."""
        calls = next((calls for calls, before in reversed(self._starts) if pid not in before), [])
        methods = [name for name, of in calls if of is plugin and not name.startswith("_")]
        return f"{plugin.__name__}.{methods[-1]}" if methods else plugin.__name__


def came_back(pids: Iterable[int], patience: float = 1.0) -> int:
    """Return one of these children that has ended as a forked child does that comes back from a call; 0: none has.

    Each is given ``patience`` seconds to come back.
    """
    for pid in pids:
        until = time.monotonic() + patience
        with contextlib.suppress(OSError):  # reaped by who started it
            while time.monotonic() < until:
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    if (ended.si_code, ended.si_status) == (os.CLD_EXITED, FORKED_STATUS):
                        return pid
                    break
                time.sleep(_PAUSE_SECONDS)
    return 0


def end_children(pids: Iterable[int]) -> None:
    """Kill these children of this process, and reap them."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""


def _on_event(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS and ChildWatch._now is not None:  # noqa: SLF001 -- its own module
        ChildWatch._now.note(sys._getframe(1))  # noqa: SLF001 -- the one way there is
