"""The log thread: writes log lines, so that a slow or stuck log handler blocks no other thread.

Neither the engine's thread nor the launcher may wait for it: a host that hangs is killed even if the log is stuck.
"""

import contextlib
import logging
import queue
import threading
from collections import deque

from kvtiers.host.messages import SAY_ONCE

__all__ = ["LogThread"]

_log = logging.getLogger("kvtiers.secondary")
_MOST_WAITING = 1_000
_MOST_REMEMBERED = 100


class LogThread:
    """Writes to the logger of this package, in order. Its thread starts with the first line."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._said_once: deque[str] = deque(maxlen=_MOST_REMEMBERED)

    def post(self, level: int, text: str) -> None:
        """Write a line on another thread; never waits. It is dropped, and counted, if very many are waiting already.

        ``level``: as in ``logging``, below 128; with SAY_ONCE nothing happens if the text has been written so before.
        """
        if level & SAY_ONCE and text in self._said_once:
            return
        if self._lines.qsize() >= _MOST_WAITING:
            self._dropped += 1
            return
        if level & SAY_ONCE:
            self._said_once.append(text)
        self._lines.put((level & ~SAY_ONCE, text))
        if self._thread is None:
            self._start()

    def close(self, timeout: float) -> None:
        """Write what is waiting, for ``timeout`` seconds at most, and end the thread."""
        if self._thread is None and not self._lines.empty():
            self._start()
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvtiers-log", daemon=True)
                with contextlib.suppress(RuntimeError):  # none can be had now: it is tried again with the next line
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            _log.log(line[0], "%s", line[1])
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                _log.warning("%d log lines were dropped, since the log is too slow", dropped)
