"""Starts tier hosts, watches them, kills those that hang, and starts them again.

One thread for each manager, which lives as long as the manager: the parent-death signal of a host follows the thread
that started it. Everything that may wait (a fork, a reaped process, a log) happens here and never on the engine's
thread; the two exchange requests and events through queues.
"""

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["HostLauncher", "HostProcess"]

_log = logging.getLogger("kvtiers.secondary")
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_HEALTHY_SECONDS = 60.0  # a host that lived this long starts again without delay
_WATCH_SECONDS = 0.05
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[4]); from kvtiers.secondary.host import main; main()"


@dataclass(slots=True, eq=False)
class HostProcess:
    """One host over all its lives. ``connections`` and ``reaped`` are for the engine's thread to take from."""

    name: str
    hello: Callable[[], bytes]
    connections: deque[socket.socket] = field(default_factory=deque)
    """The engine's end of the socket of each life, as it begins; non-blocking, the HELLO is sent already."""
    reaped: deque[int] = field(default_factory=deque)
    """One entry, the exit status, for each life that has ended: nothing of it touches memory any more."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay: float = 0.0
    start_at: float = 0.0
    ending: bool = False
    """It was told to end, and stays away."""
    kill_at: dict[int, float] = field(default_factory=dict)
    """Jobs that the host may not outlive: when each is due."""

    def forgive(self, job_id: int) -> None:
        """Note that the job has ended after all."""
        self.kill_at.pop(job_id, None)


class HostLauncher:
    """The thread. ``region_fd`` is handed to every host; it stays the caller's."""

    def __init__(self, region_fd: int) -> None:
        self._region_fd = region_fd
        self._hosts: list[HostProcess] = []
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-launcher", daemon=True)
        self._thread.start()

    # -- from any thread; none of these waits

    def start(self, host: HostProcess) -> None:
        """Start a host, and start it again whenever it ends."""
        self._requests.put(lambda: self._hosts.append(host))

    def kill_unless_done(self, host: HostProcess, job_id: int, seconds: float) -> None:
        """Kill the host in so many seconds unless ``job_done`` comes first."""
        due = time.monotonic() + seconds
        self._requests.put(lambda: host.kill_at.__setitem__(job_id, due))

    def job_done(self, host: HostProcess, job_id: int) -> None:
        """Take back ``kill_unless_done``."""
        self._requests.put(lambda: host.forgive(job_id))

    def kill(self, host: HostProcess, reason: str) -> None:
        """Kill the host now."""
        self._requests.put(lambda: self._kill(host, reason))

    def log(self, level: int, text: str) -> None:
        """Write a host's log line, here and not on the engine's thread."""
        self._requests.put(lambda: _log.log(level, "%s", text))

    def close(self, timeout: float) -> None:
        """Let the hosts end by themselves within ``timeout`` seconds, then kill them; reap all, end the thread."""
        until = time.monotonic() + timeout
        self._requests.put(lambda: self._end(until))
        self._thread.join(timeout + 10.0)

    # -- the thread

    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Empty):
                self._requests.get(timeout=self._pause())()
                while True:
                    self._requests.get_nowait()()
            now = time.monotonic()
            for host in self._hosts:
                self._watch(host, now)

    def _pause(self) -> float:
        return _WATCH_SECONDS if self._hosts else 3600.0

    def _watch(self, host: HostProcess, now: float) -> None:
        if host.process is None:
            if now >= host.start_at and not host.ending:
                self._spawn(host)
        elif (status := host.process.poll()) is not None:
            self._buried(host, status)
            if host.ending:
                return
            lived = now - host.started
            host.delay = 0.0 if lived >= _HEALTHY_SECONDS else min(max(host.delay * 2, _FIRST_DELAY), _LONGEST_DELAY)
            host.start_at = now + host.delay
            _log.warning("%s: its host ended (%s); a new one starts in %gs", host.name, _how(status), host.delay)
        elif host.kill_at and min(host.kill_at.values()) <= now:
            self._kill(host, "a job did not end")

    def _spawn(self, host: HostProcess) -> None:
        host.started = time.monotonic()
        ours, theirs = socket.socketpair()
        told = [str(theirs.fileno()), str(self._region_fd), str(os.getpid()), json.dumps(sys.path)]
        arguments = [sys.executable, "-c", _START, *told]
        try:
            host.process = subprocess.Popen(  # noqa: S603 -- our own interpreter, our own module
                arguments, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._region_fd)
            )
            ours.sendall(host.hello())
        except OSError as error:
            _log.warning("%s: its host cannot be started: %s", host.name, error)
            ours.close()
            host.start_at = host.started + _FIRST_DELAY
        else:
            ours.setblocking(False)
            host.connections.append(ours)
        finally:
            theirs.close()

    def _kill(self, host: HostProcess, reason: str) -> None:
        host.kill_at.clear()
        if host.process is not None and host.process.poll() is None:
            _log.warning("%s: its host is killed: %s", host.name, reason)
            host.process.kill()

    @staticmethod
    def _buried(host: HostProcess, status: int) -> None:
        host.process = None
        host.kill_at.clear()
        host.reaped.append(status)

    def _end(self, until: float) -> None:
        self._closing = True
        for host in self._hosts:
            while host.connections:  # never taken up: nobody told that host to end, but the end of its socket does
                host.connections.popleft().close()
        for host in self._hosts:
            if host.process is None:
                continue
            try:
                host.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(host, "it did not end with the engine")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    host.process.wait(5.0)  # one in uninterruptible sleep ends when the kernel lets it


def _how(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
