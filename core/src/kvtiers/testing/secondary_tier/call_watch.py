"""The watch over a tier's calls on the engine's thread: what sleeps, opens, connects, or waits there is found.

Two ways, since neither sees all. Python reports to an audit hook that a thread is about to sleep (from 3.13 on), to
open a file, to connect, to start a process: one such report is enough. What waits in another way, for a lock, a result
or a socket, is away from its processor meanwhile: a call that is away for long each time waits, and one that is so now
and then shares a busy machine.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["CallWatch"]

_AWAY_SECONDS = (
    0.002  # a waiting network or disk takes as long; the interpreter's lock, when all else is idle, does not
)
_TURNS_AT_LEAST = 10
_STACK_LINES = 6
_ADVICE = (
    "it runs on the engine's thread, in every step, where nothing may wait: leave that to a thread or an event loop of "
    "the tier's own, and report the outcome in a later step"
)
_WAITS = {
    "time.sleep": "sleeps",
    "open": "opens a file",
    "os.listdir": "lists a folder",
    "os.scandir": "lists a folder",
    "os.mkdir": "makes a folder",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "fcntl.flock": "waits for a file's lock",
    "fcntl.lockf": "waits for a file's lock",
    "socket.connect": "connects",
    "socket.getaddrinfo": "looks up an address",
    "socket.gethostbyname": "looks up an address",
    "sqlite3.connect": "opens a database",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
}


class CallWatch:
    """Makes calls on the thread it is made on, and keeps the trouble of each, by method."""

    _watching: "CallWatch | None" = None
    _is_hooked = False

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._method = ""
        self._is_warm: set[str] = set()
        self._reported: dict[str, str] = {}
        self._away: dict[str, list[float]] = {}
        self._stack: dict[str, str] = {}

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Make one call. The first of each method is not judged: it may import what it uses."""
        name = function.__name__
        self._hook()
        sampler = self._sampler(name)
        self._method, CallWatch._watching = name, self if name in self._is_warm else None
        begin, begin_on_processor = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments)
        finally:
            away = time.perf_counter() - begin - (time.thread_time() - begin_on_processor)
            CallWatch._watching = None
            if sampler:
                sampler.cancel()
            if name in self._is_warm:
                self._away.setdefault(name, []).append(away)
            self._is_warm.add(name)

    def troubles(self, tier: object) -> list[str]:
        """Return one line, and a stack, for each method that does not keep the promise."""
        found = []
        for name, calls in self._away.items():
            where = f"{type(tier).__name__}.{name}"
            if name in self._reported:
                found.append(f"{where} {self._reported[name]}")
            elif len(calls) >= _TURNS_AT_LEAST and min(calls) > _AWAY_SECONDS:
                waited = f"{where} waits: {1000 * min(calls):.1f} ms and more in each of {len(calls)} calls; {_ADVICE}"
                found.append(waited + self._stack.get(name, ""))
        return found

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Keep the first thing that the watched call does and that waits; other threads may do it."""
        if threading.get_ident() != self._thread or self._method in self._reported:
            return
        if event == "time.sleep" and not arguments[0]:
            return  # gives way to other threads, and comes back at once
        given = f"{arguments[0]!r:.80}" if event in {"time.sleep", "open", "os.listdir", "os.scandir"} else ""
        stack = _lines(traceback.format_stack()[:-2])
        self._reported[self._method] = f"{_WAITS[event]} ({event}({given})); {_ADVICE}{stack}"

    def _sampler(self, name: str) -> threading.Timer | None:
        """Return a timer that notes where the next call stands, for a method whose calls have all been slow so far."""
        calls = self._away.get(name)
        if not calls or min(calls) <= _AWAY_SECONDS or name in self._stack:
            return None
        timer = threading.Timer(min(calls) / 2, self._note_stack, (name,))
        timer.daemon = True
        timer.start()
        return timer

    def _note_stack(self, name: str) -> None:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 -- the one way there is
        if frame is not None and CallWatch._watching is self:
            self._stack[name] = _lines(traceback.format_stack(frame))

    @classmethod
    def _hook(cls) -> None:
        if not cls._is_hooked:  # a hook stays for the life of the process
            cls._is_hooked = True
            sys.addaudithook(cls._on_event)

    @classmethod
    def _on_event(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls._watching is not None and event in _WAITS:
            cls._watching.note_event(event, arguments)


def _lines(stack: list[str]) -> str:
    return "; it stands here:\n" + "".join(stack[-_STACK_LINES:]).rstrip()
