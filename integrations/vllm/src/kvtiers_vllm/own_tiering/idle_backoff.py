"""Idle backoff: a short sleep in steps that compute nothing while loads run or a lookup is not answered yet.

vLLM steps as fast as it can while a request waits for its KV. On a machine with few processors that takes one of them
from the processes that load, and in one process it takes the interpreter from the thread that copies: each of its turns
comes after a switch interval, 5 ms, then. A pause is short compared with the wait so far, so that the end of a
load is seen in time, and short compared with a step that computes, since a request may arrive meanwhile.

A request whose lookup is not answered yet is deferred by a step. Where nothing else is computed that is an empty one,
which takes as long as most answers; and where several requests have come at once, it is the step that computes the
others, and takes far longer than an answer: so the scheduling pass pauses first.

Where the rank that loads is in this process, the end of a load and the arrival of a request end a pause (``Wakeup``),
so that it may be longer: on an H100 steps of 1 ms between pauses of 1 ms took 15 of 55 ms from the copy thread.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["IdleBackoff", "LoadWatch", "Wakeup"]

_log = logging.getLogger("kvtiers.vllm")

_SHARE = 0.05  # of the time since the engine began to wait
_SHORTEST = 0.0001
_LONGEST = 0.001
_LONGEST_WATCHED = 0.005  # the end of a load, or a request that comes, ends it sooner
_ANSWER = 0.002  # of four requests at once on two processors, nearly all were answered by then


class Wakeup:
    """Ends the pause of an engine in this process. ``watched``: how many loads will end it; read on any thread."""

    def __init__(self) -> None:
        self.watched = 0
        self._event = threading.Event()

    def announce(self) -> None:
        """End the current pause, or the next one at once."""
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Pause until something is announced, ``seconds`` at most."""
        self._event.wait(seconds)
        self._event.clear()


class LoadWatch:
    """Announces the end of each load. ``wait``: blocks until these jobs have ended. Starts its thread when needed."""

    def __init__(self, wait: Callable[[set[int]], object], wakeup: Wakeup) -> None:
        self._wait = wait
        self._wakeup = wakeup
        self._jobs: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, job_id: int) -> None:
        """Announce the end of this job."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtiers-loads", daemon=True)
            self._thread.start()
        self._wakeup.watched += 1
        self._jobs.put(job_id)

    def close(self) -> None:
        """End the thread once the jobs that are watched have ended."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job_id := self._jobs.get()) is not None:
            try:
                self._wait({job_id})
            except Exception as error:  # noqa: BLE001 -- the worker reports what is wrong with a job
                _log.debug("waiting for load %d: %s", job_id, error)
            self._wakeup.watched -= 1
            self._wakeup.announce()


class IdleBackoff:
    """The idle backoff of one engine: decides on and makes its pauses, on its thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._idle_since: float | None = None
        self._answer_by: float | None = None

    def for_answer(self) -> bool:
        """Pause within a pass of an engine that was idle before; False: it has paused long enough in this step."""
        now = self._clock()
        if self._answer_by is None:
            self._answer_by = now + _ANSWER
        if now >= self._answer_by:
            return False
        self._sleep(_SHORTEST)
        return True

    def step(self, *, idle: bool, watched: bool = False) -> None:
        """End a step. ``idle``: nothing is computed in it, and loads run. ``watched``: their end ends the pause."""
        self._answer_by = None
        if not idle:
            self._idle_since = None
            return
        now = self._clock()
        if self._idle_since is None:
            self._idle_since = now
        if watched:
            self._sleep(_LONGEST_WATCHED)
            return
        self._sleep(min(_LONGEST, max(_SHORTEST, _SHARE * (now - self._idle_since))))
