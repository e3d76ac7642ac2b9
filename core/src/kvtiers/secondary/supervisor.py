"""The supervisor of tier hosts: starts them, watches them, kills those that hang, reaps and restarts them.

=================  ==========================================================================================
thread             does
=================  ==========================================================================================
any                posts requests; takes new lives from ``HostProcess.lives``, reads what became of them
launcher (1)       forks, kills, reaps. It lives until the last host has ended: the parent-death signal of a
                   host follows the thread that started it
waiter (1 a life)  hands the region to the process as soon as that is tied to this one's life; waits in the kernel
                   until it has ended, without reaping it, and reports it
=================  ==========================================================================================

No thread polls, so an idle engine is not woken. A *life* is one process of a host, from its fork until it is reaped.
What the host's stores have started is in its process group, and is killed when the host or the engine has ended.
"""

import contextlib
import itertools
import logging
import math
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtiers._failures import error_text
from kvtiers._process import hand_over, kill_unreaped, lifeline, spawn, wait_unreaped
from kvtiers.region.early_memory import LentMemory

if TYPE_CHECKING:
    import subprocess

__all__ = ["USUAL_PACE", "HostLauncher", "HostLife", "HostPace", "HostProcess"]

_log = logging.getLogger("kvtiers.secondary")
_HEALTHY_SECONDS = 60.0  # a host that lived this long starts again without delay
_REAP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class HostPace:
    """How soon hosts are started again, listened to and let go; times in seconds."""

    first_delay: float = 1.0
    """Until a host that has ended starts again, doubled up to ``longest_delay`` with each life that was short."""
    longest_delay: float = 60.0
    last_seconds: float = 1.0
    """For a host that has closed its connection to end by itself."""
    close_seconds: float = 3.0
    """For a host to close its store, once it is asked to."""
    end_seconds: float = 4.0
    """For all hosts to end at the engine's end, also when draining has taken all the time there was."""
    look_seconds: float = 0.02
    """How often a host is polled while no request waits for its answer. Polling seldom is cheaper: most of the cost are
    the first calls, whose code and data the engine's own work has evicted from the processor's caches. All hosts are
    polled in the same step."""
    frames_per_poll: int = 1024
    """Messages of one host that a poll takes at most."""


USUAL_PACE = HostPace()


@dataclass(slots=True, eq=False)
class HostLife:
    """One process of a host, from fork to reap. ``connection``: our end of its socket, non-blocking, HELLO sent.

    ``group``: the lifeline of its process group.
    """

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    group: socket.socket
    started: float
    kill_at: dict[str, float] = field(default_factory=dict)
    """Reasons to kill it, each with its time. From any thread."""
    read_at: float = -math.inf
    """When the engine last read all its messages. A reason that became due later may be outdated: an idle engine does
    not read. Infinite once the engine reads no more."""
    being_killed: bool = False
    """It has been killed, or is about to be: its messages are ignored."""
    has_reported: bool = False
    """It has sent a message. Before that it has been given nothing to do."""
    status: int | None = None
    """The exit status, once it has been reaped: nothing of it touches memory any more."""

    def cancel_kill(self, reason: str) -> None:
        """Withdraw a reason to kill it."""
        self.kill_at.pop(reason, None)

    def detach(self) -> None:
        """Close our descriptors: after the end, and in a forked child, where they would hide the engine's end."""
        self.connection.close()
        self.group.close()


@dataclass(slots=True, eq=False)
class HostProcess:
    """One host over all its lives. ``hello``: makes the first message of each life, on the launcher's thread."""

    name: str
    hello: Callable[[], bytes]
    lives: deque[HostLife] = field(default_factory=deque)
    """For the engine's thread to take from, in order."""
    life: HostLife | None = None
    delay: float = 0.0
    start_at: float = 0.0
    started: int = 0
    """Lives so far."""
    trouble: str = ""
    """Why it could not be started, the last time that it could not."""
    ending: bool = False
    """It is to end, and is not started again."""
    forgotten: bool = False
    """Its tier has been detached."""
    expected_to_end: bool = False
    """Jobs of it were dropped at the engine's end, which was logged: that it is killed for them is not worth a line."""


class HostLauncher:
    """The thread. ``region_fd`` is handed to every host and stays the caller's.

    ``more_fds``: others that hosts get, whose presence the HELLO says. ``lender``: of the memory, if it is lent.
    """

    def __init__(
        self,
        region_fd: int,
        more_fds: Sequence[int] = (),
        lender: LentMemory | None = None,
        pace: HostPace = USUAL_PACE,
    ) -> None:
        self.pace = pace
        self._region_fd = region_fd
        self._lender = lender
        self._numbers = itertools.count(-2, -1)  # for the lender; ranks have those from 0
        self._more_fds = more_fds
        self._hosts: list[HostProcess] = []
        self._waiters: list[threading.Thread] = []
        self._requests: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvtiers-launcher", daemon=True)
        self._thread.start()

    # -- from any thread; none of these waits

    def start(self, host: HostProcess) -> None:
        """Start a host, and start it again whenever it ends."""
        self._requests.put(lambda: self._hosts.append(host))

    def forget(self, host: HostProcess) -> None:
        """Start a host never again, and forget it as soon as its last process has been reaped."""
        host.ending = host.forgotten = True
        self._requests.put(lambda: None)

    def kill(self, host: HostProcess, life: HostLife, reason: str) -> None:
        """Kill this process of the host now."""
        life.being_killed = True
        self._requests.put(lambda: self._kill(host, life, reason))

    def discard(self, life: HostLife) -> None:
        """Kill a process that has not been given anything to do, without a log line."""
        life.being_killed = True
        self._requests.put(lambda: _kill_if_running(life))

    def kill_after(self, life: HostLife, reason: str, seconds: float) -> None:
        """Kill the host in so many seconds unless ``life.cancel_kill(reason)`` comes first."""
        life.kill_at[reason] = time.monotonic() + seconds
        self._requests.put(lambda: None)  # so that the thread wakes up in time

    def all_read(self, life: HostLife) -> None:
        """Record that all messages of this process have been read: reasons that are due now are not outdated."""
        life.read_at = max(life.read_at, time.monotonic())
        if any(due <= life.read_at for due in list(life.kill_at.values())):
            self._requests.put(lambda: None)

    def close(self, timeout: float) -> None:
        """Let the hosts end by themselves within ``timeout`` seconds, then kill them; return when all are reaped.

        One in uninterruptible sleep ends when the kernel lets it, and is reaped then: it is not waited for.
        """
        until = time.monotonic() + timeout
        self._requests.put(lambda: self._end(until))
        for thread in (self._thread, *self._waiters):
            thread.join(max(0.0, until + _REAP_SECONDS - time.monotonic()))

    # -- the thread

    def _run(self) -> None:
        while not (self._closing and all(host.life is None for host in self._hosts)):
            request: Callable[[], object] = self._look
            with contextlib.suppress(queue.Empty):
                request = self._requests.get(timeout=self._pause())
            for work in (request, self._look):
                try:
                    work()
                except Exception as error:  # noqa: BLE001 -- with this thread, all hosts would die
                    with contextlib.suppress(Exception):  # what raised may be the user's record factory
                        _log.error("tier hosts: %s", error_text(error))

    def _pause(self) -> float | None:
        """Return how long there is nothing to do but requests; None: for ever."""
        now = time.monotonic()
        due = [host.start_at for host in self._hosts if host.life is None and not host.ending]
        for life in [host.life for host in self._hosts if host.life and not host.life.being_killed]:
            due += [at for at in list(life.kill_at.values()) if at > now or at <= life.read_at]
        return max(0.0, min(due) - now) if due else None

    def _look(self) -> None:
        now = time.monotonic()
        self._hosts = [host for host in self._hosts if not host.forgotten or host.life is not None]
        for host in self._hosts:
            life = host.life
            if life is None:
                if now >= host.start_at and not host.ending:
                    self._spawn(host)
            elif not life.being_killed and (reasons := _due_reasons(life, now)):
                self._kill(host, life, reasons[0])

    def _spawn(self, host: HostProcess) -> None:
        pair: tuple[socket.socket, ...] = ()
        try:
            ours, theirs, handover, its_handover = pair = (*socket.socketpair(), *socket.socketpair())
            hello = host.hello()
            process = self._fork(host, theirs, its_handover)
            its_handover.close()
            life = self._begin(host, process, ours, handover)
        except Exception as error:  # noqa: BLE001 -- no descriptors, memory, processes, interpreter: it is tried again
            for end in pair:
                end.close()
            host.trouble = f"its host cannot be started: {error_text(error)}"
            self._back_off(host, 0.0)
            _log.warning("%s: %s; next try in %gs", host.name, host.trouble, host.delay)
            return
        theirs.close()
        with contextlib.suppress(OSError):  # it has ended already: the waiter says so
            ours.sendall(hello)
        ours.setblocking(False)
        _close_unused(host)
        host.lives.append(life)
        if host.ending:
            _kill_if_running(life)

    def _begin(
        self, host: HostProcess, process: "subprocess.Popen[bytes]", ours: socket.socket, handover: socket.socket
    ) -> HostLife:
        life: HostLife | None = None
        try:
            life = HostLife(process, ours, lifeline(process), time.monotonic())
            what = host, life, handover
            waiter = threading.Thread(target=self._attend, args=what, name="kvtiers-waiter", daemon=True)
            waiter.start()
            self._waiters = [*(each for each in self._waiters if each.is_alive()), waiter]
        except Exception:  # no descriptor, thread or memory to be had: it would never be reaped
            process.kill()
            process.wait()
            if life is not None:
                life.detach()
            raise
        host.life = life
        host.started += 1
        return life

    def _fork(self, host: HostProcess, theirs: socket.socket, handover: socket.socket) -> "subprocess.Popen[bytes]":
        passed = theirs.fileno(), handover.fileno()
        arguments = [str(fd) for fd in passed]
        # A group of its own: a host that is stopped while it starts must end with the engine (host/__main__.py), and
        # what its stores have started must end with it.
        return spawn("kvtiers.host.__main__", arguments, name=host.name, pass_fds=passed, process_group=0)

    def _attend(self, host: HostProcess, life: HostLife, handover: socket.socket) -> None:
        """Hand the region over once the host asks for it, then wait for its end."""
        number = next(self._numbers)
        try:
            with handover:
                if self._lender is not None:  # a device may write for a host that has ended: its descriptors end last
                    _watch(self._lender, number, life.process.pid)
                hand_over(handover, [self._region_fd, *self._more_fds])
        except OSError as error:
            _log.warning("%s: its host gets no memory: %s", host.name, error)
            _kill_if_running(life)
        finally:  # a user's filter may have raised: nobody else waits for its end
            self._wait(host, life)
            if self._lender is not None:
                self._lender.unwatch(number)

    def _wait(self, host: HostProcess, life: HostLife) -> None:
        wait_unreaped(life.process)
        self._requests.put(lambda: self._reap(host, life))

    def _reap(self, host: HostProcess, life: HostLife) -> None:
        life.group.close()
        status = life.process.wait()
        host.life = None
        self._back_off(host, time.monotonic() - life.started)
        life.status = status  # from now on its rows may be leased again
        if not host.ending:
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            _log.log(_level(host), "%s: its host ended (%s); a new one starts in %gs", host.name, how, host.delay)

    def _back_off(self, host: HostProcess, lived: float) -> None:
        longer = min(max(host.delay * 2, self.pace.first_delay), self.pace.longest_delay)
        host.delay = 0.0 if lived >= _HEALTHY_SECONDS else longer
        host.start_at = time.monotonic() + host.delay

    def _kill(self, host: HostProcess, life: HostLife, reason: str) -> None:
        life.being_killed = True
        life.kill_at.clear()
        if _kill_if_running(life):
            _log.log(_level(host), "%s: its host is killed: %s", host.name, reason)

    def _end(self, until: float) -> None:
        self._closing = True
        for host in self._hosts:
            host.ending = True
            if host.life is not None:
                host.life.read_at = math.inf
                host.life.kill_at["it did not end with the engine"] = until


def _due_reasons(life: HostLife, now: float) -> list[str]:
    return [why for why, due in list(life.kill_at.items()) if due <= min(now, life.read_at)]


def _close_unused(host: HostProcess) -> None:
    """Close what earlier lives, which have all ended, left for an engine that has not stepped since."""
    with contextlib.suppress(IndexError):
        while True:
            host.lives.popleft().detach()


def _level(host: HostProcess) -> int:
    return logging.DEBUG if host.expected_to_end else logging.WARNING


def _kill_if_running(life: HostLife) -> bool:
    return life.status is None and kill_unreaped(life.process)


def _watch(lender: LentMemory, number: int, pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        lender.watch(number, pidfd)
    finally:
        os.close(pidfd)
