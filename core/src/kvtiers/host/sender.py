"""The sender of a tier host, to its engine: events as they come, log lines, and once a second the stores' figures.

The start of a job is sent after a moment, and not at all if the job has ended by then: the engine needs it for the
deadline of long jobs only, and each message costs the engine's thread time. A log line goes to the engine's log, with
the tier's name.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from kvtiers._failures import plugin_boundary
from kvtiers.host.messages import SAY_ONCE

__all__ = ["HostSender", "send_logs"]

_TICK_SECONDS = 1.0
_KEPT_SECONDS = 0.05
_START_SECONDS = 0.05
_BYTES_PER_SEND = 1 << 16
_MOST_LINES_WAITING = 1_000
_LINES_PER_SECOND = 50
_LONGEST_LINE = 4_000


class HostSender:
    """The sending thread: messages in order.

    ``figures`` is asked for a message, b"" for none, once a second; ``check_kept`` is called more often, as long as it
    returns True; ``idle`` once, a second after the last message. ``tick_seconds``: that second. ``start_seconds``: how
    long the start of a job is kept back.
    """

    def __init__(
        self,
        connection: socket.socket,
        figures: Callable[[], bytes],
        check_kept: Callable[[], bool],
        idle: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        tick_seconds: float = _TICK_SECONDS,
        start_seconds: float = _START_SECONDS,
    ) -> None:
        self._connection = connection
        self._figures = figures
        self._check_kept = check_kept
        self._idle = idle
        self._clock = clock
        self._tick_seconds = tick_seconds
        self._start_seconds = start_seconds
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._starts: dict[int, tuple[float, bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="kvtiers-host-writer", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def post(self, message: bytes) -> None:
        """Queue a message; never waits."""
        self._messages.put(message)

    def post_start(self, job_id: int, message: bytes) -> None:
        """Send in a moment that a job has begun, unless its end comes first."""
        is_first = not self._starts
        self._starts[job_id] = self._clock() + self._start_seconds, message
        if is_first:
            self._messages.put(b"")  # the thread may be waiting for longer than a moment

    def post_end(self, job_id: int, message: bytes) -> None:
        """Send that a job has ended."""
        self._starts.pop(job_id, None)
        self._messages.put(message)

    def post_line(self, message: bytes) -> bool:
        """Queue a log line; False, and dropped, if too much is waiting because the engine does not read."""
        if self._messages.qsize() >= _MOST_LINES_WAITING:
            return False
        self._messages.put(message)
        return True

    def close(self, timeout: float) -> None:
        """Send what is waiting, and end the thread."""
        self._messages.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        tick_at = self._clock() + self._tick_seconds
        going, sent, has_sent = True, False, False
        try:
            while going:
                is_short = self._check_kept() or self._starts
                data, going = self._collect(_KEPT_SECONDS if is_short else max(0.0, tick_at - self._clock()))
                data += self._due_starts()
                sent = sent or bool(data)
                if self._clock() >= tick_at:
                    tick_at = self._clock() + self._tick_seconds
                    data += self._figures()
                    if has_sent and not sent:
                        self._idle()
                    has_sent, sent = sent, False
                if data:
                    self._connection.sendall(data)
        except OSError:
            os._exit(0)  # the engine is gone

    def _due_starts(self) -> bytes:
        """Return what is to be said now. The end of one that is taken here is not in the queue yet."""
        now, due = self._clock(), list[bytes]()
        for job, (at, message) in self._starts.copy().items():
            if at > now:
                break
            if self._starts.pop(job, None) is not None:
                due.append(message)
        return b"".join(due)

    def _collect(self, wait: float) -> tuple[bytes, bool]:
        """Wait for a message and take all there are, up to a sensible size; return whether to go on after these."""
        parts, nbytes = list[bytes](), 0
        try:
            message = self._messages.get(timeout=wait)
            while message is not None:
                parts.append(message)
                nbytes += len(message)
                if nbytes >= _BYTES_PER_SEND:
                    return b"".join(parts), True
                message = self._messages.get_nowait()
        except queue.Empty:
            return b"".join(parts), True
        return b"".join(parts), False


def send_logs(tier: str, level: int, send: Callable[[int, str], bool]) -> None:
    """Pass what is logged in this process to ``send(level, text)``, which says whether it took the line.

    One that is logged with ``extra={"once": True}`` has SAY_ONCE added to its level: the engine logs it once, however
    many hosts send it.
    """
    root = logging.getLogger()
    root.setLevel(max(level, logging.INFO))  # what clients log for debugging can hold secrets
    root.addHandler(_LogSender(tier, send))
    logging.captureWarnings(True)


class _LogSender(logging.Handler):
    """Sends a bounded number of lines a second; a backend that logs without end must not drown the engine."""

    def __init__(self, tier: str, send: Callable[[int, str], bool]) -> None:
        super().__init__()
        self._start = f"{tier}: "
        self._send = send
        self._second = 0
        self._sent = 0
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. Called under the handler's lock."""
        with plugin_boundary() as formatting:  # a record that cannot be formatted must not fail a store's call
            if not self._may_send():
                self._dropped += 1
                return
            text = self.format(record)[:_LONGEST_LINE]
            if self._dropped:
                text += f" ({self._dropped} lines before this one were dropped)"
            level = max(0, min(record.levelno, SAY_ONCE - 1)) | (SAY_ONCE if getattr(record, "once", False) else 0)
            if self._send(level, text if text.startswith(self._start) else self._start + text):  # as core's own do
                self._dropped = 0
            else:
                self._dropped += 1
        if formatting.error:
            self._dropped += 1

    def _may_send(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._sent = second, 0
        self._sent += 1
        return self._sent <= _LINES_PER_SECOND
