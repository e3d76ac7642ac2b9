"""A lane: tasks of one kind, the threads that run them, their results, and the descriptor that says so.

Every task has exactly one result, whatever becomes of it: what its work returns, or, if that raises or the lane is
closed before, the task's own ``otherwise``. The descriptor becomes readable with each result.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from kvtiers._failures import log_with_backoff

__all__ = ["Lane"]

_log = logging.getLogger("kvtiers.lmcache")
Result = TypeVar("Result")


class _Task(NamedTuple, Generic[Result]):
    number: int
    work: Callable[[], Result]


class Lane(Generic[Result]):
    """Tasks of one kind. Any thread. ``fd``: an eventfd, of this lane alone, until ``release``."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self.failed = 0
        """Tasks whose work has raised."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Task[Result] | None] = queue.SimpleQueue()
        self._last = 0
        self._otherwise: dict[int, Result] = {}
        """Of the tasks that have no result yet."""
        self._results: dict[int, Result] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvtiers-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result], otherwise: Result) -> int:
        """Queue a task, and return its number."""
        with self._lock:
            self._last += 1
            number = self._last
            self._otherwise[number] = otherwise
            if not self._is_closed:
                self._queue.put(_Task(number, work))
                return number
        self._end(number)
        return number

    def pop(self, number: int) -> Result | None:
        """Return the result of a task, once; None if it has none yet."""
        with self._lock:
            return self._results.pop(number, None)

    def pop_all(self) -> dict[int, Result]:
        """Return all results that have not been taken, by the tasks' numbers."""
        with self._lock:
            taken, self._results = self._results, {}
            return taken

    def running(self) -> int:
        """Return how many tasks have no result yet."""
        with self._lock:
            return len(self._otherwise)

    def close(self) -> None:
        """Run no further task: those that wait have their results now, those that run go on."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (task := self._queue.get_nowait()) is not None:
                    self._end(task.number)
        for _ in self._threads:
            self._queue.put(None)

    def join(self, until: float) -> bool:
        """Wait until then for tasks that run, after ``close``; those that still do have their results now.

        False: some do; their work may use its objects for a while.
        """
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            late = list(self._otherwise)
        for number in late:
            self._end(number)
        return not late

    def release(self) -> None:
        """Close the descriptor."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            self._end(task.number, task.work)
            del task  # its objects are not held until the next one comes

    def _end(self, number: int, work: Callable[[], Result] | None = None) -> None:
        made: list[Result] = []
        if work is not None and not self._is_closed:
            try:
                made.append(work())
            except BaseException:  # noqa: BLE001 -- the thread has to live, and the task has to end
                self.failed += 1
                message = "a %s task failed (%d times so far); LMCache goes on without"
                log_with_backoff(self.failed, _log.exception, message, self.name, self.failed)
        with self._lock:
            if number not in self._otherwise:  # it had to be ended before
                return
            otherwise = self._otherwise.pop(number)
            self._results[number] = made[0] if made else otherwise
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):  # it is full, so it is readable
                    os.eventfd_write(self.fd, 1)
